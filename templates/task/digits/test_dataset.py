"""The digits, how they are shifted, and the metrics of what the model predicts."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from support import module, settings

dataset = module("dataset")


def test_the_split_is_fixed() -> None:
    train_set, test_set = dataset.Digits("train"), dataset.Digits("test")
    assert (len(train_set), len(test_set)) == (1437, 360)
    image, label = test_set[0]
    assert image.shape == (1, 8, 8) and image.dtype == torch.float32 and 0 <= image.min() <= image.max() <= 1
    assert label.dtype == torch.int64


def test_a_training_image_is_shifted_differently_in_each_epoch() -> None:
    train_set, test_set = dataset.build_datasets(settings("--dataset.max_shift", "2"))
    for images, shifts in ((train_set, range(10, 21)), (test_set, [1])):
        seeded = module("splitting").SeededDataset(images, list, seed=1)
        shifted = {tuple(image.flatten().tolist()) for image, _ in seeded.__getitems__([(e, 5) for e in range(20)])}
        assert len(shifted) in shifts


def test_the_metrics_are_those_of_the_images() -> None:
    torch.manual_seed(0)
    targets = torch.arange(50) % 10
    outputs = torch.randn(50, 10) + 2 * torch.nn.functional.one_hot(targets, 10)
    loss = -outputs.double().softmax(dim=1).gather(1, targets[:, None]).log().mean().item()
    right = [row.index(max(row)) == label for row, label in zip(outputs.tolist(), targets.tolist(), strict=True)]
    of_class = [sum(right[label::10]) / 5 for label in range(10)]
    assert min(of_class) < max(of_class)

    per_sample = {name: values.numpy() for name, values in dataset.per_sample_metrics(outputs, targets).items()}
    metrics = dataset.aggregate_metrics(per_sample)
    assert metrics.pop("class_accuracy") == pytest.approx(of_class)
    assert metrics == pytest.approx({"loss": loss, "accuracy": sum(right) / 50})
    total, weight = dataset.loss_fn(outputs, targets)
    assert weight == 50 and total.item() / weight == pytest.approx(loss)


def test_the_confusion_matrix_counts_each_image() -> None:
    torch.manual_seed(0)
    _, test_set = dataset.build_datasets(settings())
    target, prediction = test_set.labels.numpy(), torch.randint(10, (360,)).numpy()
    metrics = {"target": target, "prediction": prediction, "loss": torch.rand(360).numpy()}
    evaluator = SimpleNamespace(metrics=metrics, samples=SimpleNamespace(dataset=test_set))
    drawn = dataset.examples(evaluator)
    axes = drawn["confusion.png"]().axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")
    shown = {(text.get_position()[1], text.get_position()[0]): int(text.get_text()) for text in axes.texts}
    assert shown == Counter(zip(target.tolist(), prediction.tolist(), strict=True))
    axes = drawn["misread.png"]().axes[0]
    misread = [index for index in range(360) if target[index] != prediction[index]]
    worst = sorted(misread, key=lambda index: -metrics["loss"][index])[: len(axes.texts)]
    assert [text.get_text() for text in axes.texts] == [f"{target[index]} as {prediction[index]}" for index in worst]
    for image, index in zip(axes.images, worst, strict=True):
        assert (image.get_array() == test_set.images[index].numpy()).all()
    assert axes.get_title().startswith(f"{len(misread)} of 360 ")
