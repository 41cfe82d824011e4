"""The scaling benchmark: its networks, its arithmetic, its picture, and its bars."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import jax
import numpy as np
import pytest
from headline import predict_data_parallelism
from numpy.lib.stride_tricks import sliding_window_view

import shardwright as sw
from benchmarks.scaling.__main__ import MOST, curves, missed_bars
from benchmarks.scaling.picture import draw
from benchmarks.scaling.predictions import Prediction, find_matmul_efficiency
from benchmarks.scaling.published import PUBLISHED
from benchmarks.scaling.settings import HEADLINE, Setting, build_cluster, write_profile
from shardwright.cost import hardware_profile
from workloads.cases import is_leaf
from workloads.image_classifiers.layers import (
    Branches,
    Chain,
    Convolution,
    Dense,
    MaxPool,
    MeanPool,
    Residual,
    batch_norm,
)
from workloads.image_classifiers.networks import CLASSIFIERS, Classifier, build, resnet

SVG = "{http://www.w3.org/2000/svg}"


def drawn(tree, seed: int = 0):
    """Arrays of the shapes of a tree."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda aval: generator.normal(0, 0.3, aval.shape).astype(np.float32), tree)


def parameters(layer, shape):
    return drawn(jax.tree.map(lambda leaf: leaf.aval, layer.parameters(shape), is_leaf=is_leaf))


def windows(x: np.ndarray, size: tuple[int, int], stride: int, padding: str, fill: float) -> np.ndarray:
    """[batch, height, width, channels, size, size] of the windows; `SAME` as TensorFlow defines it."""
    if padding == "SAME":
        outputs = [-(-extent // stride) for extent in x.shape[1:3]]
        missing = [
            max((count - 1) * stride + length - extent, 0)
            for count, length, extent in zip(outputs, size, x.shape[1:3], strict=True)
        ]
        x = np.pad(x, ((0, 0), *((m // 2, m - m // 2) for m in missing), (0, 0)), constant_values=fill)
    return sliding_window_view(x, size, (1, 2))[:, ::stride, ::stride]


def convolve(layer: Convolution, params, x: np.ndarray) -> np.ndarray:
    seen = windows(x, layer.size, layer.stride, layer.padding, 0.0)
    y = np.einsum("bhwcij,ijco->bhwo", seen, params["kernel"].astype(np.float64))
    if layer.is_normalized:
        y = (y - y.mean((0, 1, 2))) / np.sqrt(y.var((0, 1, 2)) + 1e-3) * params["scale"]
    y = y + params["offset"]
    return np.maximum(y, 0) if layer.is_rectified else y


@pytest.mark.parametrize(
    ("model", "count", "features"),
    [
        ("ResNet-101", 44.55, (7, 7, 2048)),
        ("Inception V3", 23.83, (8, 8, 2048)),
        ("VGG-16", 138.36, (7, 7, 512)),
    ],
)
def test_networks_have_the_published_parameters_and_features(
    model: str, count: float, features: tuple[int, ...]
) -> None:
    classifier = CLASSIFIERS[model]
    shape = (2, classifier.image, classifier.image, 3)
    avals = jax.tree.map(lambda leaf: leaf.aval, classifier.network.parameters(shape), is_leaf=is_leaf)
    assert round(sum(leaf.size for leaf in jax.tree.leaves(avals)) / 1e6, 2) == count
    body = Chain(classifier.network.layers[: -3 if model == "VGG-16" else -2])  # without the classifier
    images = jax.ShapeDtypeStruct(shape, "float32")
    kept = avals[: len(body.layers)]
    assert jax.eval_shape(lambda p, x: body.apply(p, x, batch_norm), kept, images).shape == (2, *features)


@pytest.mark.parametrize(
    "layer",
    [
        Convolution(channels=5, size=(7, 7), stride=2),
        Convolution(channels=5, size=(1, 7)),
        Convolution(channels=5, size=(3, 3), stride=2, padding="VALID", is_rectified=False),
        Convolution(channels=5, size=(3, 3), is_normalized=False),
    ],
)
def test_convolutions_compute_what_numpy_does(layer: Convolution) -> None:
    x = drawn(jax.ShapeDtypeStruct((4, 9, 12, 3), "float32"), seed=1)
    params = parameters(layer, x.shape)
    np.testing.assert_allclose(layer.apply(params, x, batch_norm), convolve(layer, params, x), atol=2e-4)


def test_pools_and_what_joins_layers_compute_what_numpy_does() -> None:
    x = drawn(jax.ShapeDtypeStruct((2, 9, 9, 4), "float32"), seed=2)
    most = MaxPool(size=3, stride=2, padding="SAME").apply((), x, batch_norm)
    np.testing.assert_array_equal(most, windows(x, (3, 3), 2, "SAME", -np.inf).max((-2, -1)))
    mean = MeanPool(size=3).apply((), x, batch_norm)
    np.testing.assert_allclose(mean, windows(x, (3, 3), 1, "SAME", 0.0).mean((-2, -1)), atol=1e-6)

    convolution = Convolution(channels=4)
    residual, branches = Residual(body=convolution), Branches((convolution, MeanPool(size=3)))
    params = parameters(residual, x.shape)
    computed = convolve(convolution, params["body"], x)
    np.testing.assert_allclose(residual.apply(params, x, batch_norm), np.maximum(computed + x, 0), atol=2e-4)
    joined = branches.apply([params["body"], ()], x, batch_norm)
    np.testing.assert_allclose(joined, np.concatenate([computed, mean], -1), atol=2e-4)

    dense = Dense(features=3, is_rectified=True)
    params = parameters(dense, x.shape)
    rows = np.maximum(x.reshape(2, -1) @ params["weight"] + params["bias"], 0)
    np.testing.assert_allclose(dense.apply(params, x, batch_norm), rows, rtol=1e-4, atol=1e-5)


def test_images_of_a_group_never_meet_those_of_another() -> None:
    network = resnet(blocks=(1,), width=4)
    images = drawn(jax.ShapeDtypeStruct((8, 8, 8, 3), "float32"), seed=3)
    params = parameters(network, images.shape)
    normalize = sw.local_statistics(batch_norm, groups=4)
    grouped = jax.jit(lambda images: network.apply(params, images, normalize))(images)
    apply = jax.jit(lambda images: network.apply(params, images, batch_norm))
    np.testing.assert_allclose(grouped, np.concatenate([apply(part) for part in np.split(images, 4)]), atol=1e-4)


def test_a_step_trains() -> None:
    network = Chain((Convolution(channels=4, size=(3, 3)), MaxPool(size=2, stride=2), Dense(features=10)))
    case = build(Classifier(network=network, image=8), 4, groups=2)
    params = jax.tree.map(lambda array: 0.05 * array, drawn(case.avals[0]))
    opt_state = jax.tree.map(lambda aval: np.zeros(aval.shape, aval.dtype), case.avals[1])
    batch = {"images": drawn(case.avals[2]["images"]), "labels": np.arange(4, dtype=np.int32)}
    step, losses = jax.jit(case.step), []
    for _ in range(5):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_one_device_attains_the_wanted_step() -> None:
    def step_s(part: float) -> float:
        return 0.3 / part + 0.05

    found = find_matmul_efficiency([step_s(0.5), step_s(1.0)], step_s(0.72), (0.5, 1.0))
    assert found == pytest.approx(0.72)
    with pytest.raises(ValueError, match="no products"):
        find_matmul_efficiency([step_s(0.5), step_s(1.0)], 0.04, (0.5, 1.0))


def test_resnet_101_lies_in_the_middle_of_its_neighbours() -> None:
    assert 1 / PUBLISHED["ResNet-101"].images_per_s == pytest.approx((1 / 219 + 1 / 91.8) / 2)


def test_profiles_and_clusters_say_what_a_setting_does(tmp_path: Path) -> None:
    path = write_profile(tmp_path, 0.4375)
    profile, plain = hardware_profile(str(path)), hardware_profile("p100")
    assert (profile.matmul_efficiency, profile.memory_bytes) == (0.4375, plain.memory_bytes)
    cluster = build_cluster(512, Setting(), str(path))
    assert (len(cluster.nodes), cluster.device_count, cluster.overlap) == (128, 512, 1.0)
    assert cluster.inter_node is not None
    assert cluster.inter_node.bandwidth_bytes_per_s == pytest.approx(25e9 / 8 / 4)
    assert build_cluster(2, Setting(), "p100").device_count == 2


def prediction(model: str, devices: int = MOST, **changes) -> Prediction:
    plain = Prediction(
        model=model, setting=HEADLINE, strategy="data", devices=devices, mesh="data=512", one_step_s=0.9, step_s=1.0,
        compute_s=0.9, communication_s=0.1, hidden_s=0.2, gap=0.01, device_bytes=10**10, matmul_efficiency=0.6,
        plan_s=1.0, cpu_s=1.0, process_bytes=10**9,
    )  # fmt: skip
    return replace(plain, **changes)


GOOD = [prediction("ResNet-101"), prediction("Inception V3"), prediction("VGG-16", step_s=0.9 / 0.68)]


def test_bars_hold_or_are_named() -> None:
    alone = prediction("VGG-16", one_step_s=0.3, step_s=0.4, hidden_s=0.1)
    assert (alone.efficiency, alone.least_efficiency) == pytest.approx((0.75, 0.6))
    assert missed_bars(GOOD) == []
    assert missed_bars([*GOOD, prediction("VGG-16", strategy="search", step_s=0.5)]) == []
    slower = prediction("ResNet-101", strategy="search", step_s=1.2)
    assert [text.split(":")[0] for text in missed_bars([*GOOD, slower])] == ["ResNet-101"]
    assert "VGG-16 is at 90.0%" in missed_bars([*GOOD[:2], prediction("VGG-16")])[0]
    assert "2 GB" in missed_bars([prediction("ResNet-101", process_bytes=3 * 10**9)])[0]
    low = [*GOOD[1:], prediction("ResNet-101", step_s=1.5)]
    assert len(missed_bars(low)) == 2  # below its bar, and VGG-16 not the lowest


def test_the_picture_is_xml_that_shows_all() -> None:
    found = [*GOOD, *(prediction(model, devices=4, step_s=0.91) for model in PUBLISHED)]
    found.append(prediction("VGG-16", strategy="search", step_s=0.95))
    root = ET.fromstring(draw("a < b & c", curves(found)))
    assert root.tag == SVG + "svg"
    assert root.findtext(SVG + "title") == "a < b & c"
    lines = [line.get("points", "").split() for line in root.iter(SVG + "polyline")]
    assert [len(points) for points in lines] == [2, 2, 2]
    around = [area.get("points", "").split() for area in root.iter(SVG + "polygon")]
    assert [len(points) for points in around] == [4, 4, 4]
    titles = {title.text for bar in root.iter(SVG + "rect") for title in bar.iter(SVG + "title")}
    assert {"VGG-16, published: 68.0 %", "VGG-16, data parallel: 68.0 %", "VGG-16, free search: 94.7 %"} <= titles
    heights = [float(bar.get("height", 0)) for bar in root.iter(SVG + "rect") if len(bar)]
    assert max(heights) == pytest.approx(heights[-2])  # the free search's bar of VGG-16
    assert ET.fromstring(draw("nothing", [])).tag == SVG + "svg"


def test_the_picture_of_the_documents_is_this_one() -> None:
    path = Path(__file__).parents[2] / "docs" / "benchmarks" / "scaling.svg"
    titles = [title.text or "" for title in ET.parse(path).getroot().iter(SVG + "title")]
    assert all(any(text.startswith(f"{model}, published") for text in titles) for model in PUBLISHED)


@pytest.mark.dear
@pytest.mark.parametrize("model", PUBLISHED)
def test_data_parallelism_scales_as_published(model: str, tmp_path: Path) -> None:
    """In a process of its own, whose memory is that of planning."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        prediction = process.submit(predict_data_parallelism, model, tmp_path).result()
    assert missed_bars([prediction]) == []
    assert prediction.device_bytes < 16e9
