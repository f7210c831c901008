"""Cut text into pieces of words on worker threads that share one vocabulary.

Tokenising is pure Python, so threads gain by it on free-threaded Python only: with the GIL one thread at a time runs
Python code, and workers just take turns. All threads look pieces up in the same dict, which free-threaded Python makes
slow, unless `share` takes the counting of references away: on 3.14t and newer from the whole vocabulary, on 3.13t from
its keys and values, but not from the dict itself. So a copy for each thread is measured, too.
"""

import argparse
import re
import sys
import threading
from collections import Counter

import numpy as np
from common import check, has_gil, interpreter, items_per_second, standard_library, usable_cores

from dataloader_rs import PyDataloader, PyDataset, share

Tokens = np.ndarray
Vocabulary = dict[str, int]

WORD = re.compile(r"\w+|[^\w\s]")
LINES = 40  # of source text in an item


def read_texts(files: int) -> list[str]:
    """The largest modules of the standard library, cut into pieces of some lines."""
    texts = []
    for path in sorted(standard_library(), key=lambda path: -path.stat().st_size)[:files]:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        texts += ["".join(lines[first : first + LINES]) for first in range(0, len(lines), LINES)]
    return texts


def learn_vocabulary(texts: list[str], words: int, ends: int) -> Vocabulary:
    """The most frequent words and ends of words, and every character, so that no text is without tokens."""
    counts = Counter(word for text in texts for word in WORD.findall(text))
    of_ends: Counter[str] = Counter()
    for word, count in counts.items():
        for first in range(1, len(word) - 1):
            of_ends[word[first:]] += count
    pieces = [piece for piece, _ in counts.most_common(words)] + [piece for piece, _ in of_ends.most_common(ends)]
    pieces += sorted({character for word in counts for character in word})
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def tokenise(text: str, vocabulary: Vocabulary) -> list[int]:
    """Numbers of the longest pieces that each word begins with, one after the other."""
    tokens = []
    for word in WORD.findall(text):
        start = 0
        while start < len(word):
            end = len(word)
            while (token := vocabulary.get(word[start:end])) is None:
                end -= 1
            tokens.append(token)
            start = end
    return tokens


class SharedVocabulary(PyDataset[Tokens]):
    """Texts as arrays of tokens.

    Thread safety: workers call `__getitem__` on several threads at once, so it only reads.
    """

    def __init__(self, texts: list[str], vocabulary: Vocabulary) -> None:
        super().__init__()
        self.texts = texts
        # Once, on the thread that made it, and before workers read it. What is immortal is never freed: this is for
        # tables that are needed until the process ends.
        self.vocabulary = share(vocabulary, immortal=True)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tokens:
        # An array holds no Python objects that other threads would have to count and free.
        return np.array(tokenise(self.texts[index], self.vocabulary), dtype=np.int32)


class OwnVocabulary(SharedVocabulary):
    """The same with a copy of the vocabulary for each thread, words included."""

    def __init__(self, texts: list[str], vocabulary: Vocabulary) -> None:
        super().__init__(texts, vocabulary)
        self.own = threading.local()

    def __getitem__(self, index: int) -> Tokens:
        vocabulary: Vocabulary | None = getattr(self.own, "vocabulary", None)
        if vocabulary is None:
            copied = {piece.encode().decode(): number for piece, number in self.vocabulary.items()}
            vocabulary = self.own.vocabulary = copied
        return np.array(tokenise(self.texts[index], vocabulary), dtype=np.int32)


def as_text(tokens: Tokens, pieces: list[str]) -> str:
    """What was tokenised, without its white space."""
    return "".join([pieces[token] for token in tokens.tolist()])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=usable_cores(), help="threads that load (%(default)s)")
    parser.add_argument("--files", type=int, default=6, help="modules of the standard library (%(default)s)")
    options = parser.parse_args()

    texts = read_texts(options.files)
    vocabulary = learn_vocabulary(texts, words=4000, ends=2000)
    shared = SharedVocabulary(texts, vocabulary)
    own = OwnVocabulary(texts, vocabulary)
    print(interpreter())

    def loader(dataset: SharedVocabulary, num_workers: int) -> PyDataloader[Tokens, list[Tokens]]:
        return PyDataloader(dataset, batch_size=16, num_workers=num_workers)

    pieces = list(vocabulary)
    num_tokens = 0
    with loader(shared, options.workers) as batches:
        tokenised = [tokens for batch in batches for tokens in batch]
    for text, tokens in zip(texts, tokenised, strict=True):
        check(as_text(tokens, pieces) == "".join(text.split()), "tokens give the text back")
        num_tokens += len(tokens)
    print(f"{len(texts)} texts, {num_tokens:,} tokens of {len(vocabulary):,} kinds, and all the text comes back")

    alone, together, apart = items_per_second([loader(shared, 0), loader(shared, options.workers),
                                               loader(own, options.workers)])
    print(f"texts per second without workers: {alone}")
    print(f"with {options.workers} workers and one vocabulary: {together} ({together.against(alone)})")
    print(f"with {options.workers} workers and a copy for each: {apart} ({apart.against(alone)})")
    if has_gil():
        print("(the GIL lets one thread at a time run Python code, and all of this is Python code)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
