"""The operability check on a real GPU. Run there: ``JAX_PLATFORMS=cuda pytest -m gpu tests/gpu/test_operability_gpu.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from leto_jax.agent import doctor, nvml, operability, probe
from leto_jax.agent.operability import Operability, Verdict

pytestmark = pytest.mark.gpu
FAULT = "from leto_jax.shadow import gpu_faults; gpu_faults.run('{kind}', 0)"


@pytest.fixture
def checked(tmp_path):
    """Started over all GPUs that are visible."""
    library = nvml.library()
    found = Operability(tmp_path, sorted(nvml.job_indices(library, os.environ)))
    library.nvmlShutdown()
    verdict = found.start()
    assert verdict.operable, verdict.reason
    yield found
    found.close()


def look(checked: Operability, kind: str) -> Verdict:
    began = time.monotonic()
    verdict = checked.check(kind)
    print(f"{kind}: {(time.monotonic() - began) * 1000:.1f} ms, {verdict}")
    return verdict


def test_a_healthy_gpu_goes_on_without_a_probe(checked):
    for _ in range(3):
        verdict = look(checked, "SIGKILL")
        assert verdict.operable, verdict.reason
        assert verdict.evidence["probe"] is None
        for gpu in verdict.evidence["gpus"]:
            assert gpu["recovery_action"] == nvml.RecoveryAction.NONE
            assert gpu["ecc_uncorrected"] is not None
            assert gpu["remap_failed"] is False
    assert verdict.evidence["xids"] == []


def test_after_a_hang_a_probe_runs_within_its_deadline(checked):
    verdict = look(checked, "hang")
    assert verdict.operable, verdict.reason
    assert set(verdict.evidence["probe"]["results"].values()) == {""}
    assert verdict.evidence["probe"]["secs"] < probe.PROBE_SECS


@pytest.mark.parametrize("kind", ["illegal_address", "trap"])
def test_another_process_with_a_fault_leaves_xids_and_a_gpu_that_goes_on(checked, kind):
    died = subprocess.run([sys.executable, "-c", FAULT.format(kind=kind)], capture_output=True, text=True, timeout=60, check=False)
    assert "CUDA_ERROR" in died.stderr
    time.sleep(1)
    verdict = look(checked, "exit")
    assert verdict.operable, verdict.reason
    # A container may not be told of Xids; where it is, a probe has run.
    found = {item["number"] for item in verdict.evidence["xids"]}
    assert found <= {13, 31, 43, 45}
    assert bool(found) == (verdict.evidence["probe"] is not None)


def test_a_process_that_is_killed_while_it_computes(checked):
    """Prints what a plain SIGKILL leaves: at most the Xid of the cleaning up, and no probe."""
    with subprocess.Popen([sys.executable, "-c", FAULT.format(kind="spin")]) as spinning:
        time.sleep(3)
        assert spinning.poll() is None
        spinning.kill()
    verdict = look(checked, "SIGKILL")
    assert verdict.operable, verdict.reason
    assert {item["number"] for item in verdict.evidence["xids"]} <= {45}
    assert verdict.evidence["probe"] is None


def test_the_doctor_shows_the_facts():
    row = next(row for row in doctor.examine([item for item in doctor.PROBES if item.check == "GPU operability"]))
    print(json.dumps(row, indent=1))
    assert row["ok"], row["found"]
    assert row["advice"] == ""
    for gpu in row["facts"]["gpus"]:
        assert gpu["ok"]
        assert gpu["uuid"].startswith("GPU-")
        assert gpu["mig"] is False
        for name in ("recovery_action", "ecc_uncorrected", "remap_pending", "remap_failed", "mps_clients"):
            assert gpu[name] is not None, name
    assert row["facts"]["reason"] == ""


def test_numbers_of_gpus_are_those_of_cuda():
    from leto_jax.arena import cuda

    uuids = {gpu["gpu"]: gpu["uuid"] for gpu in operability.examine()["gpus"]}
    assert len(uuids) == cuda.call("cuDeviceGetCount")
    for gpu, uuid in uuids.items():
        raw = bytes(cuda.call("cuDeviceGetUuid", cuda.call("cuDeviceGet", gpu)).bytes)
        assert raw.hex() == uuid.removeprefix("GPU-").replace("-", "")
