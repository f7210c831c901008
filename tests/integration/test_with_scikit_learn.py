"""A classifier of scikit-learn that is fed by our loader learns what it learns from torch's."""

from __future__ import annotations

from same_batches import every_size, library

from dataloader_rs import PyDataloader, PyDataset

np = library("numpy")
linear_model = library("sklearn", "linear_model").linear_model
torch = library("torch")

LENGTH = 300


class Points(PyDataset):
    """Points around two centres, with the number of the centre."""

    def __init__(self) -> None:
        super().__init__()
        source = np.random.default_rng(6)
        self.labels = source.integers(0, 2, LENGTH)
        self.points = source.normal(size=(LENGTH, 8)) + 3 * self.labels[:, None]

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int):
        return self.points[index], self.labels[index]


def stacked(samples: list) -> tuple:
    points, labels = zip(*samples, strict=True)
    return np.stack(points), np.array(labels)


def fitted(loader, num_epochs: int):
    classifier = linear_model.SGDClassifier(random_state=0)
    for _ in range(num_epochs):
        for points, labels in loader:
            classifier.partial_fit(points, labels, classes=[0, 1])
    return classifier


@every_size
def test_partial_fit_learns_what_it_learns_from_torch(num_workers: int):
    """The same batches in the same order: equal coefficients to the last bit, after several epochs."""
    dataset = Points()
    order = np.random.default_rng(7).permutation(LENGTH).tolist()
    ours = fitted(PyDataloader(dataset, batch_size=16, sampler=order, num_workers=num_workers, collate_fn=stacked), 3)
    theirs = fitted(torch.utils.data.DataLoader(dataset, batch_size=16, sampler=order, collate_fn=stacked), 3)
    np.testing.assert_array_equal(ours.coef_, theirs.coef_)
    np.testing.assert_array_equal(ours.intercept_, theirs.intercept_)


@every_size
def test_partial_fit_over_shuffled_batches_learns(num_workers: int):
    """With our own shuffle a classifier tells the two kinds of points apart, the same for any number of workers."""
    dataset = Points()

    def learnt(workers: int):
        return fitted(PyDataloader(dataset, batch_size=16, shuffle=True, seed=3, num_workers=workers,
                                   collate_fn=stacked), 2)

    classifier = learnt(num_workers)
    assert classifier.score(dataset.points, dataset.labels) > 0.95
    np.testing.assert_array_equal(classifier.coef_, learnt(0).coef_)
