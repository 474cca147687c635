"""Workload files, and the iteration-time model over them."""

from dataclasses import replace

import pytest

from leto_jax.errors import UsageError
from leto_jax.sim.hardware import HARDWARE
from leto_jax.sim.predict import COMPUTE_EFFICIENCY, fit, iteration_time, relative_time, with_iteration_time
from leto_jax.sim.units import parse_duration
from leto_jax.sim.workload import Parallelism, known_workloads, load_workload, scaled, workload_from_dict

PAPER = {  # paper.md, workload table: GPUs in use, billions of parameters and active, measured iteration
    "qwen": (4, 4.0, 4.0, 3.556),
    "olmoe": (4, 6.9, 1.3, 12.002),
    "deepseek-moe": (64, 16.4, 2.8, 5.927),
    "gpt-moe": (64, 20.9, 3.6, 5.363),
    "kimi-moe": (64, 49.1, 3.1, 9.097),
    "deepseek-v2": (1024, 236, 21, None),
    "deepseek-v3": (16384, 671, 37, None),
    "deepseek-v4": (131072, 1600, 49, None),
}
MEASURED = [name for name, row in PAPER.items() if row[3]]


@pytest.mark.parametrize("name", PAPER)
def test_workload_files_agree_with_the_paper(name):
    workload = load_workload(name)
    gpus, params, active, secs = PAPER[name]
    assert (workload.gpus, workload.iteration_secs) == (gpus, secs)
    assert (workload.model.params, workload.model.active) == pytest.approx((params * 1e9, active * 1e9))
    assert workload.assumptions, "what the paper does not give must be listed"


def test_every_file_is_known():
    assert set(known_workloads()) == set(PAPER)


@pytest.mark.parametrize("name", MEASURED)
def test_checkpoint_cost_follows_from_the_tuned_interval(name):
    """c = (I T)^2 / (2 MTTF) at MTTF 10 min, which is what the file says that it is."""
    workload = load_workload(name)
    training = workload.paper["tuned_interval"]["10m"] * workload.iteration_secs
    assert workload.checkpoint_cost_secs == pytest.approx(training**2 / (2 * parse_duration("10m")), rel=0.01)


def test_unknown_workload_lists_the_known():
    with pytest.raises(UsageError, match=r"workload: expected one of deepseek-moe, .*qwen, or the path of a \.yaml file, found 'gpt-5'"):
        load_workload("gpt-5")


BASE = {
    "name": "mine",
    "title": "Mine",
    "source": "test",
    "hardware": "h100",
    "gpus_per_node": 8,
    "optimizer_sharded": True,
    "model": {"params_billions": 1, "active_billions": 1, "layers": 2, "hidden": 64},
    "parallelism": {"dp": 4},
    "batch": {"sequences_per_replica": 1, "sequence_length": 128},
}


def test_smallest_file():
    workload = workload_from_dict(BASE, "mine.yaml")
    assert workload.parallelism == Parallelism(dp=4, tp=1, pp=1, ep=1)
    assert workload.tokens_per_iteration == 512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hardware": "tpu"}, r"hardware: expected one of a100, h100, h200, found 'tpu'"),
        ({"iteration_secs": -1}, r"mine\.yaml: iteration_secs: expected a time above zero, found -1 s"),
        ({"gpus_per_node": 0}, r"mine\.yaml: gpus_per_node: expected a whole number above zero, found 0"),
        ({"gpus_per_node": "eight"}, r"mine\.yaml: gpus_per_node: expected int, found 'eight'"),
        ({"optimiser_sharded": True}, r"mine\.yaml: unknown entry 'optimiser_sharded'; remove it or correct its name"),
        ({"model": {"params_billions": 1}}, r"mine\.yaml: model: expected an entry 'active_billions', found none"),
        ({"model": 3}, r"mine\.yaml: model: expected dict, found 3"),
        ({"parallelism": {"dp": 4, "ep": 3}}, r"parallelism: expected ep to divide dp x tp = 4 x 1 = 4, found ep = 3"),
        ({"parallelism": {"dp": True}}, r"parallelism: dp: expected int, found True"),
    ],
)
def test_bad_files_name_the_entry(change, message):
    with pytest.raises(UsageError, match=message):
        workload_from_dict(BASE | change, "mine.yaml")


def test_files_that_are_no_mapping_or_no_yaml(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("a: [1")
    with pytest.raises(UsageError, match=r"expected YAML, found"):
        load_workload(str(path))
    path.write_text("- 1")
    with pytest.raises(UsageError, match=r"expected a mapping of names to values, found list"):
        load_workload(str(path))
    with pytest.raises(UsageError, match=r"expected a readable YAML file, found '/nowhere\.yaml'"):
        load_workload("/nowhere.yaml")


def test_gpus_must_be_the_product():
    kimi = load_workload("kimi-moe")
    assert scaled(kimi, gpus=64) == kimi
    with pytest.raises(UsageError, match=r"--gpus: expected dp x tp x pp = 4 x 4 x 4 = 64 GPUs for kimi-moe, found 131072; .*--dp 8192"):
        scaled(kimi, gpus=131_072)
    with pytest.raises(UsageError, match=r"found 100; .*a multiple of tp x pp = 16"):
        scaled(kimi, gpus=100)
    with pytest.raises(UsageError, match=r"--dp: expected a count whose product with tp = 4 is a multiple of ep = 16, found 3"):
        scaled(kimi, dp=3)


def test_scaling_voids_what_was_measured_and_says_so():
    kimi = load_workload("kimi-moe")
    big = scaled(kimi, gpus=131_072, dp=8192)
    assert big.gpus == 131_072
    assert (big.iteration_secs, big.checkpoint_cost_secs) == (None, None)
    assert big.tokens_per_iteration == 2048 * kimi.tokens_per_iteration
    assert "weak scaling" in big.assumptions[-1]
    known = with_iteration_time(big)
    assert known.iteration_secs == pytest.approx(iteration_time(kimi).total_secs, rel=0.01)
    assert "predicted" in known.assumptions[-1]
    assert with_iteration_time(kimi) == kimi


def test_fitted_numbers_are_the_fit():
    efficiency, rate = fit(load_workload(name) for name in MEASURED)
    assert efficiency == pytest.approx(COMPUTE_EFFICIENCY, abs=1e-9)
    assert rate == pytest.approx(HARDWARE["a100"].all_to_all_bytes_per_sec)


def test_error_on_measured_rows_is_what_the_documents_say():
    """20 % on the five rows; the unfitted check is DeepSeek-V3's published 180,000 H800 hours for 10^12 tokens (arXiv 2412.19437)."""
    rate = HARDWARE["a100"].all_to_all_bytes_per_sec
    for name in MEASURED:
        assert relative_time(load_workload(name), COMPUTE_EFFICIENCY, rate) == pytest.approx(1, abs=0.20), name
    v3 = load_workload("deepseek-v3")
    published = replace(v3, parallelism=Parallelism(dp=128, tp=1, pp=16, ep=64))
    tokens_per_gpu_sec = 1e12 / (180_000 * 3600)
    secs = published.tokens_per_iteration / published.gpus / tokens_per_gpu_sec
    assert iteration_time(published).total_secs == pytest.approx(secs, rel=0.15)


def test_more_hardware_never_takes_longer_for_the_same_batch():
    v3 = load_workload("deepseek-v3")
    slow = replace(v3, hardware=HARDWARE["a100"])
    assert iteration_time(v3).total_secs < iteration_time(slow).total_secs
    half = replace(v3, parallelism=replace(v3.parallelism, dp=64), sequences_per_replica=240)
    assert iteration_time(v3).total_secs < iteration_time(half).total_secs


def test_dense_single_gpu_has_no_communication():
    one = replace(workload_from_dict(BASE, "mine.yaml"), parallelism=Parallelism(dp=1))
    time = iteration_time(one)
    assert (time.bubble_secs, time.tensor_secs, time.expert_secs, time.data_secs) == (0, 0, 0, 0)
    assert time.total_secs == time.compute_secs + time.update_secs
