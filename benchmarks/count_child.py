"""What `count.py` runs under callgrind: an epoch of the emptiest dataset, with as little around it as can be.

    python -S count_child.py CHECKOUT NUM_ITEMS BATCH_SIZE
"""

import sys

sys.path.append(sys.argv[1])

from dataloader_rs import PyDataloader, PyDataset


class Ids(PyDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


num_items, batch_size = map(int, sys.argv[2:])
for _ in PyDataloader(Ids(num_items), batch_size):
    pass
