"""Whether the devices of a job can go on, over a fake NVML: every recovery action, every class of Xid, and every way not to get an answer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_nvml import GPU_IS_LOST, INVALID_ARGUMENT, NOT_SUPPORTED, FakeNvml, Gpu

from leto_jax.agent import nvml, operability, probe, xid
from leto_jax.agent.nvml import RecoveryAction
from leto_jax.agent.operability import Evidence, Operability, Verdict, needs_probe
from leto_jax.agent.xid import Xid, XidClass
from leto_jax.errors import DeadlineError, DeviceError, MemoryBudgetError

# paper.md, section 3, once more: the table in the code is compared with it.
RESTART = [8, 11, 13, 31, 32, 39, 40, 41, 69, 70, 71, 80, 94]
IGNORE = [43, 45, 63, 92]
RESET = [46, 62, 64, 95, 109, 119, 120, 140, 143, 158]
OFF_BUS = [79]
UNKNOWN = [0, 1, 48, 68, 74, 999]


class Machine:
    """A job's operability over a fake NVML. `probed`: the GPUs that were probed each time. outcome: what a probe says is wrong."""

    def __init__(self, tmp_path: Path, *gpus: Gpu, **settings):
        self.fake, self.probed, self.outcome, self.now = FakeNvml(*gpus), [], "", 1000.0
        environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mps")}
        self.operability = Operability(
            tmp_path,
            range(len(self.fake.gpus)),
            environ,
            library=self.fake.library,
            run_probe=self._probe,
            clock=lambda: self.now,
            **settings,
        )

    def _probe(self, gpus, environ):
        self.probed.append(tuple(gpus))
        return dict.fromkeys(gpus, self.outcome)

    def check(self, kind: str = "SIGKILL") -> Verdict:
        self.now += 1
        verdict = self.operability.check(kind)
        json.dumps(verdict.evidence)
        return verdict


@pytest.fixture
def machine(tmp_path):
    found = Machine(tmp_path)
    assert found.operability.start().operable
    return found


@pytest.fixture
def two(tmp_path):
    found = Machine(tmp_path, Gpu(), Gpu("GPU-11111111-bbbb"))
    assert found.operability.start().operable
    return found


def test_a_killed_process_leaves_a_device_that_goes_on_without_a_probe(machine):
    verdict = machine.check()
    assert verdict.operable
    assert verdict.reason.endswith(
        "free; GPU 0: recovery action none, uncorrected ECC errors 0, row remapping none, retired pages not supported, MPS none"
    )
    assert machine.probed == []
    assert verdict.evidence["gpus"][0]["uuid"] == "GPU-00000000-aaaa"
    assert verdict.evidence["probe"] is None
    machine.operability.close()
    assert (machine.fake.opened, machine.fake.sets) == (0, {})


def test_on_the_cpu_only_the_machine_is_asked(tmp_path, monkeypatch):
    found = Operability(tmp_path, [], library=lambda: pytest.fail("NVML was opened"))
    for verdict in (found.start(), found.check("hang")):
        assert (verdict.operable, verdict.reason) == (True, verdict.evidence["machine"])
        assert "MiB of memory" in verdict.reason
    found.poll()
    found.close()
    assert operability.check(tmp_path)[0] is True
    monkeypatch.setattr(operability, "MIN_DISK_BYTES", 1 << 62)
    assert operability.check(tmp_path)[0] is False
    assert found.check("hang").operable is False


def test_a_machine_that_cannot_be_read_cannot_go_on(tmp_path, monkeypatch):
    def no_proc():
        raise MemoryBudgetError("/proc/meminfo has no MemAvailable: is /proc mounted?")

    monkeypatch.setattr(operability.limits, "available_bytes", no_proc)
    assert operability.check(tmp_path) == (
        False,
        "memory or disk cannot be read: /proc/meminfo has no MemAvailable: is /proc mounted?",
    )


def test_memory_and_disk_count_beside_gpus(machine, monkeypatch):
    monkeypatch.setattr(operability, "MIN_DISK_BYTES", 1 << 62)
    verdict = machine.check()
    assert not verdict.operable
    assert "MiB of free disk" in verdict.reason


# Recovery actions -------------------------------------------------------------------------------------------------------------------

OPERABLE = {RecoveryAction.NONE, RecoveryAction.DRAIN_AND_RESET}


@pytest.mark.parametrize("action", RecoveryAction)
def test_every_recovery_action(machine, action):
    machine.fake.gpus[0].recovery_action = action
    verdict = machine.check()
    assert verdict.operable == (action in OPERABLE)
    words = action.name.lower().replace("_", " ")
    assert (
        f"recovery action {words}" if action in OPERABLE else f"GPU 0: the driver asks for a recovery action first: {words}"
    ) in verdict.reason
    assert machine.probed == ([(0,)] if action is RecoveryAction.DRAIN_AND_RESET else [])
    machine.probed.clear()
    assert machine.check().operable == (action in OPERABLE)
    assert machine.probed == [], "an action that was there at the last check is no news"


def test_a_recovery_action_that_is_newer_than_this_program(machine):
    machine.fake.gpus[0].recovery_action = 8
    verdict = machine.check()
    assert not verdict.operable
    assert "recovery action first: 8, which is newer than this program" in verdict.reason


@pytest.mark.parametrize("code", [NOT_SUPPORTED, INVALID_ARGUMENT])
def test_a_driver_without_recovery_actions_has_a_probe_decide(machine, code):
    machine.fake.gpus[0].errors["recovery_action"] = code
    verdict = machine.check()
    assert verdict.operable
    assert "recovery action unknown to this driver" in verdict.reason
    assert "a probe kernel ran well (GPU 0 has no recovery action to ask for)" in verdict.reason
    machine.outcome = "a probe kernel did not end within 10 s"
    verdict = machine.check()
    assert (verdict.operable, verdict.reason) == (False, "GPU 0: a probe kernel did not end within 10 s")


# Xids -------------------------------------------------------------------------------------------------------------------------------


def test_the_table_of_xids_is_the_papers():
    assert {found: sorted(numbers) for found, numbers in xid.XIDS.items()} == {
        XidClass.RESTART: RESTART,
        XidClass.IGNORE: IGNORE,
        XidClass.ACTION: [154],
        XidClass.RESET: RESET,
        XidClass.OFF_BUS: OFF_BUS,
    }
    assert sum(map(len, xid.XIDS.values())) == len(frozenset().union(*xid.XIDS.values()))
    assert {xid.classify(number) for number in UNKNOWN} == {XidClass.UNKNOWN}


@pytest.mark.parametrize("number", [*RESTART, *IGNORE, 154])
def test_an_xid_after_which_a_new_process_may_go_on(machine, number):
    machine.fake.gpus[0].events.append(number)
    verdict = machine.check("exit")
    assert verdict.operable
    assert machine.probed == [(0,)]
    assert f"a probe kernel ran well (Xid {number})" in verdict.reason
    assert verdict.evidence["xids"] == [{"gpu": 0, "number": number, "at": 1001.0, "class": xid.classify(number).value}]
    assert machine.check("exit").operable
    assert machine.probed == [(0,)], "an old Xid is no reason for another probe"


@pytest.mark.parametrize("number", [*RESET, *OFF_BUS, *UNKNOWN])
def test_an_xid_after_which_none_may(machine, number):
    machine.fake.gpus[0].events += [number, 45]
    for _ in range(2):
        verdict = machine.check("exit")
        assert not verdict.operable, "and that stays so"
        wanted = {
            **dict.fromkeys(RESET, "after which one has to reset the GPU"),
            79: "after which one has to bring the GPU back to the bus",
        }
        assert verdict.reason == f"GPU 0: Xid {number}, {wanted.get(number, 'whose meaning is unknown here')}"
    assert machine.probed == []


def test_cleaning_up_after_a_kill_is_no_reason_for_a_probe(machine):
    for kind, probed in (("SIGKILL", False), ("sigkill", False), ("stopped", False), ("exit", True), ("SIGKILL", False)):
        machine.fake.gpus[0].events += [45, 45]
        assert machine.check(kind).operable
        assert bool(machine.probed) == probed
        machine.probed.clear()
    machine.fake.gpus[0].events += [31, 45]
    assert machine.check().operable
    assert machine.probed == [(0,)]


def test_polling_collects_xids_once_a_second(machine, monkeypatch):
    at = [1e6]
    monkeypatch.setattr(operability.time, "monotonic", lambda: at[0])
    events = machine.fake.gpus[0].events
    events.append(13)
    machine.operability.poll()
    assert events == []
    events.append(31)
    at[0] += 0.9
    machine.operability.poll()
    assert events == [31]
    at[0] += 0.2
    machine.now = 2000.0
    machine.operability.poll()
    assert events == []
    found = machine.check("exit").evidence["xids"]
    assert [(item["number"], item["at"]) for item in found] == [(13, 1000.0), (31, 2000.0)]


def test_a_storm_of_xids_is_read_in_parts(machine):
    machine.fake.gpus[0].events += [13] * (xid.EVENTS_AT_ONCE + 5)
    assert len(machine.check().evidence["xids"]) == 1
    assert len(machine.fake.gpus[0].events) == 5


def test_a_gpu_that_does_not_tell_of_xids_has_a_probe_decide(tmp_path):
    found = Machine(tmp_path, Gpu(errors={"nvmlDeviceRegisterEvents": NOT_SUPPORTED}))
    assert found.operability.start().operable
    assert found.check().operable
    assert found.probed == [(0,)]


def test_a_watch_that_fails_may_have_missed_something(machine):
    machine.fake.gpus[0].errors["nvmlEventSetWait"] = GPU_IS_LOST
    machine.operability.poll()
    del machine.fake.gpus[0].errors["nvmlEventSetWait"]
    verdict = machine.check()
    assert (verdict.operable, verdict.reason) == (False, "Xids may have been missed: GPU 0: NVML, nvmlEventSetWait: GPU is lost")


# Memory of the GPU ------------------------------------------------------------------------------------------------------------------


def test_new_uncorrected_errors_are_probed_once(machine):
    machine.fake.gpus[0].ecc_uncorrected = 2
    verdict = machine.check()
    assert verdict.operable
    assert "uncorrected ECC errors 2" in verdict.reason
    assert "a probe kernel ran well (GPU 0 has new uncorrected ECC errors)" in verdict.reason
    assert machine.check().operable
    assert machine.probed == [(0,)]


def test_remapped_rows(machine):
    machine.fake.gpus[0].remapped = (0, 1, 1, 0)
    verdict = machine.check()
    assert verdict.operable, "Xid 63 stands for this, and is to be ignored"
    assert "row remapping pending, reset it when convenient" in verdict.reason
    assert "a probe kernel ran well (GPU 0 has a new row to remap)" in verdict.reason
    machine.fake.gpus[0].remapped = (0, 1, 0, 1)
    verdict = machine.check()
    assert not verdict.operable
    assert verdict.reason.startswith("GPU 0: a row of its memory could not be remapped")


def test_retired_pages(tmp_path):
    found = Machine(tmp_path, Gpu(name="Tesla V100", errors={"nvmlDeviceGetRemappedRows": NOT_SUPPORTED, "recovery_action": 3}))
    assert "row remapping not supported, retired pages 0" in found.operability.start().reason
    found.fake.gpus[0].retired_pages = found.fake.gpus[0].retirement_pending = 1
    verdict = found.check()
    assert verdict.operable
    assert "retired pages 1, more after a reset" in verdict.reason
    assert "GPU 0 has new retired pages" in verdict.reason


# MPS, MIG ---------------------------------------------------------------------------------------------------------------------------


def test_mps_is_refused(tmp_path, machine):
    machine.fake.gpus[0].mps_clients = 3
    verdict = machine.check()
    assert not verdict.operable
    assert "GPU 0: MPS is active with 3 clients: a fatal fault of one reaches all" in verdict.reason
    machine.fake.gpus[0].mps_clients = 0
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps/control").write_text("")
    verdict = machine.check()
    assert not verdict.operable
    assert verdict.reason.startswith("expected no MPS")
    assert not Machine(tmp_path).operability.start().operable


def test_mig_is_refused(machine):
    machine.fake.gpus[0].mig = 1
    verdict = machine.check()
    assert (verdict.operable, "MIG is on, which is not supported" in verdict.reason) == (False, True)


# Answers that do not come -----------------------------------------------------------------------------------------------------------

OPTIONAL = [
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRetiredPages",
    "nvmlDeviceGetRetiredPagesPendingStatus",
]
NEEDED = ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetFieldValues"]


@pytest.mark.parametrize("query", [*OPTIONAL, *NEEDED])
def test_a_query_that_fails_means_no_and_is_named(machine, query):
    machine.fake.gpus[0].errors[query] = GPU_IS_LOST
    verdict = machine.check()
    assert (verdict.operable, verdict.reason) == (False, f"NVML, {query}: GPU is lost")


def test_a_field_that_fails_means_no_and_is_named(machine):
    machine.fake.gpus[0].errors["recovery_action"] = GPU_IS_LOST
    verdict = machine.check()
    assert (verdict.operable, verdict.reason) == (False, "NVML, nvmlDeviceGetFieldValues of the recovery action: GPU is lost")


def test_what_is_optional_may_be_missing(tmp_path):
    found = Machine(
        tmp_path,
        *(Gpu(f"GPU-{n}", errors=dict.fromkeys([*OPTIONAL, "nvmlDeviceGetNvLinkState", "nvmlDeviceGetP2PStatus"], 3)) for n in (1, 2)),
    )
    assert found.operability.start().operable
    verdict = found.check()
    assert verdict.operable
    assert found.probed == []
    for what in ("uncorrected ECC errors", "row remapping", "retired pages", "MPS", "NVLinks up"):
        assert verdict.reason.count(f"{what} not supported") == 2


@pytest.mark.parametrize("query", NEEDED)
def test_what_is_needed_may_not(machine, query):
    machine.fake.gpus[0].errors[query] = NOT_SUPPORTED
    assert machine.check().reason == f"NVML, {query}: Not Supported"


def test_without_nvml_at_the_start(tmp_path):
    found = Machine(tmp_path)
    assert found.check().reason == "nothing is known of the GPUs: it was not asked at the start of the job"
    found.fake.errors["nvmlInit"] = 12

    def library():
        nvml.ask(found.fake, "library")

    found.operability._library = library
    verdict = found.operability.start()
    assert (verdict.operable, verdict.reason) == (False, "NVML, library: NVML Shared Library Not Found")
    found.operability.poll()
    assert found.check().reason == f"nothing is known of the GPUs: {verdict.reason}"
    found.operability.close()


def test_a_start_that_fails_half_way_leaves_nothing_open(tmp_path):
    found = Machine(tmp_path, Gpu(errors={"nvmlDeviceGetFieldValues": 999}))
    assert not found.operability.start().operable
    found.operability.close()
    assert (found.fake.opened, found.fake.sets) == (0, {})
    found = Machine(tmp_path, Gpu(), Gpu("GPU-2", errors={"nvmlDeviceRegisterEvents": 999}))
    assert found.operability.start().reason == "NVML, nvmlDeviceRegisterEvents: Unknown Error"
    assert found.fake.sets == {}


def test_an_nvml_that_hangs_is_not_waited_for(tmp_path):
    found = Machine(tmp_path, nvml_secs=0.2)
    found.operability.start()
    found.fake.hang.clear()
    assert [(verdict.operable, verdict.reason) for verdict in (found.check(), found.check())] == [
        (False, "NVML did not answer within 0.2 s"),
        (False, "NVML has not answered an earlier question yet"),
    ]
    found.operability.poll()
    found.operability.close()
    found.fake.hang.set()


def test_within():
    assert operability.within(5, "it", lambda: 3) == 3
    with pytest.raises(DeviceError, match="no"):
        operability.within(5, "it", lambda: (_ for _ in ()).throw(DeviceError("no")))
    with pytest.raises(DeadlineError, match=r"it did not answer within 0.05 s"):
        operability.within(0.05, "it", lambda: time.sleep(1))


# Links ------------------------------------------------------------------------------------------------------------------------------


def test_a_link_that_goes_down(two):
    assert "NVLinks up 18" in two.check().reason
    two.fake.gpus[1].links[3] = 0
    verdict = two.check()
    assert (verdict.operable, verdict.reason) == (False, "GPU 1: NVLink 3 was up at the start of the job and is down")
    two.fake.gpus[1].links.clear()
    assert "GPU 1: NVLink 0, 1, 2, " in two.check().reason


def test_a_link_that_was_never_up(tmp_path):
    found = Machine(tmp_path, Gpu(links={0: 1, 1: 0}), Gpu("GPU-2", links={0: 0, 1: 1}))
    assert found.operability.start().operable
    assert found.check().operable
    found.fake.gpus[0].links[1] = 1
    assert found.check().operable


def test_a_path_between_peers_that_is_gone(two):
    two.fake.peers["GPU-00000000-aaaa", "GPU-11111111-bbbb", nvml.PEER_CAPABILITIES["nvlink"]] = 5
    verdict = two.check()
    assert (verdict.operable, verdict.reason) == (False, "GPUs 0 and 1: peer-to-peer nvlink worked at the start of the job and does not")


def test_links_of_a_single_gpu_are_not_asked_for(machine):
    machine.fake.gpus[0].errors["nvmlDeviceGetNvLinkState"] = GPU_IS_LOST
    assert machine.check().operable


# Probes -----------------------------------------------------------------------------------------------------------------------------


def evidence(kind: str, fake: FakeNvml, fresh: tuple[Xid, ...] = ()) -> Evidence:
    now = nvml.read(fake, {0: 0})
    return Evidence(kind, now, now, now, fresh, fresh)


@pytest.mark.parametrize("kind", ["illegal_address", "trap", "spin", "hang", "cuda_error", "sigabrt"])
def test_kinds_that_need_a_probe(machine, kind):
    assert needs_probe(evidence(kind, machine.fake)) == f"the failure was {kind}"
    assert machine.check(kind.upper()).operable
    assert machine.probed == [(0,)]
    machine.outcome = "a probe kernel failed: cuCtxSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"
    verdict = machine.check(kind)
    assert (verdict.operable, verdict.reason) == (False, f"GPU 0: {machine.outcome}")
    assert verdict.evidence["probe"]["results"] == {0: machine.outcome}


@pytest.mark.parametrize("kind", ["sigkill", "sigterm", "signal", "stopped", "exit", "exception", "oom", "page_loss", "refused", "damaged"])
def test_kinds_that_need_none(machine, kind):
    assert needs_probe(evidence(kind, machine.fake)) == ""
    assert needs_probe(evidence(kind, machine.fake, (Xid(0, 31, 1.0),))) == "Xid 31"


def test_a_device_whose_probe_failed_is_probed_until_one_runs_well(machine):
    machine.outcome = "a probe kernel failed: exit code 1"
    assert not machine.check("hang").operable
    assert not machine.check("SIGKILL").operable
    machine.outcome = ""
    assert "a probe kernel ran well (the last probe failed)" in machine.check("SIGKILL").reason
    assert machine.check("SIGKILL").operable
    assert len(machine.probed) == 3


def command(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def test_a_probe_that_outlasts_its_deadline_is_killed(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    found = probe.run([0, 3], secs=1.5, command=command(code))
    assert found == dict.fromkeys([0, 3], "a probe kernel did not end within 1.5 s")
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_what_a_probe_may_come_to(tmp_path):
    assert probe.run([0, 1], command=command("import sys; sys.exit(sys.argv[1] == '1' and 'noise\\nthe word')")) == {
        0: "",
        1: "a probe kernel failed: the word",
    }
    assert probe.run([0], command=command("import os; os._exit(9)")) == {0: "a probe kernel failed: exit code 9"}
    assert probe.run([0], command=command("import os, sys; sys.exit(os.environ['X'])"), environ={"X": "env"}) == {
        0: "a probe kernel failed: env"
    }
    assert probe.run([2], command=[str(tmp_path / "none")])[2].startswith("a probe kernel could not be started: [Errno 2]")


def test_a_probe_ends_by_itself(tmp_path):
    """If the agent is gone, nobody kills it."""
    code = "from leto_jax.agent import probe; import time; probe.use = lambda gpu: time.sleep(60); probe.main(['0', '1'])"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == -14


def test_the_real_probe_needs_a_gpu_and_no_jax():
    code = "import sys, leto_jax.agent.operability, leto_jax.agent.probe; sys.exit(any(m in sys.modules for m in ('jax', 'numpy', 'pynvml', 'cuda')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    if nvml_is_here():
        pytest.skip("there is a GPU")
    found = probe.run([0], environ={"PATH": ""}, secs=60)[0]
    assert found.startswith("a probe kernel failed: expected an NVIDIA driver, found none")


def nvml_is_here() -> bool:
    try:
        nvml.library().nvmlShutdown()
    except DeviceError:
        return False
    return True


# Which GPU ------------------------------------------------------------------------------------------------------------------------

UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("NoDevFiles", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 2 , 1 ", [2, 1]),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        ("GPU-cccc-3,GPU-aaaa-1", [2, 0]),
        ("GPU-aab,0", [1, 0]),
        ("GPU-aa,0", []),
        ("GPU-dddd", []),
        ("1,x,2", [1]),
    ],
)
def test_visible_gpus(setting, expected):
    assert nvml.visible(setting, UUIDS) == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("MIG-1234", "CUDA_VISIBLE_DEVICES names MIG-1234: MIG devices are not supported, name whole GPUs"),
        ("0,MIG-GPU-aaaa-1/1/0", "names MIG-GPU-aaaa-1/1/0: MIG devices"),
        ("1,1", "names GPU 1 twice"),
        ("1,GPU-aabb", "names GPU 1 twice"),
    ],
)
def test_visible_gpus_that_are_refused(setting, message):
    with pytest.raises(DeviceError, match=message):
        nvml.visible(setting, UUIDS)


def test_numbers_of_a_jobs_gpus():
    fake = FakeNvml(*(Gpu(uuid) for uuid in UUIDS))
    assert nvml.job_indices(fake, {}) == {0: 0, 1: 1, 2: 2}
    assert nvml.job_indices(fake, {"CUDA_VISIBLE_DEVICES": "2,0"}, [1]) == {1: 0}
    assert nvml.job_indices(fake, {"CUDA_VISIBLE_DEVICES": "GPU-cccc"}, [0]) == {0: 2}
    with pytest.raises(DeviceError, match=r"expected GPU 1, found 1 of 3 visible \(CUDA_VISIBLE_DEVICES=2\)"):
        nvml.job_indices(fake, {"CUDA_VISIBLE_DEVICES": "2"}, [0, 1])
    with pytest.raises(DeviceError, match=r"expected GPU 3, found 3 of 3 visible \(CUDA_VISIBLE_DEVICES=not set\)"):
        nvml.job_indices(fake, {}, [3])
    fake.gpus[1].name = "NVIDIA T4"
    with pytest.raises(DeviceError, match=r"several models \(NVIDIA H200, NVIDIA T4\)"):
        nvml.job_indices(fake, {"CUDA_VISIBLE_DEVICES": "0"})
    assert nvml.job_indices(fake, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}) == {0: 1}
    assert nvml.job_indices(fake, {"CUDA_VISIBLE_DEVICES": "GPU-aabb"}) == {0: 1}


def test_facts_are_those_of_the_jobs_gpu(tmp_path):
    fake = FakeNvml(Gpu(recovery_action=1), Gpu("GPU-2"))
    found = Operability(
        tmp_path,
        [0],
        {"CUDA_VISIBLE_DEVICES": "1", "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)},
        library=fake.library,
        run_probe=lambda *_: {},
    )
    assert found.start().operable
    fake.gpus[0].events.append(79)
    verdict = found.check("sigkill")
    assert verdict.operable
    assert (verdict.evidence["gpus"][0]["index"], verdict.evidence["gpus"][0]["uuid"]) == (1, "GPU-2")


# The binding ------------------------------------------------------------------------------------------------------------------------


def test_the_fake_is_like_the_real_binding():
    real = pytest.importorskip("pynvml")
    for name in dir(FakeNvml):
        if name.startswith(("NVML_", "nvmlEvent")) and isinstance(getattr(FakeNvml, name), int):
            assert getattr(real, name) == getattr(FakeNvml, name), name
        elif name.startswith("nvml"):
            assert callable(getattr(real, name)), name
    for action in RecoveryAction:
        assert getattr(real, f"NVML_GPU_RECOVERY_ACTION_{action.name}", action) == action
    assert real.NVMLError(real.NVML_ERROR_TIMEOUT).value == FakeNvml.NVML_ERROR_TIMEOUT


def test_the_real_binding_without_a_driver():
    pytest.importorskip("pynvml")
    if nvml_is_here():
        pytest.skip("there is a GPU")
    with pytest.raises(nvml.QueryError, match=r"NVML, nvmlInit: NVML Shared Library Not Found"):
        nvml.library()
    assert operability.examine({})["reason"] == "NVML, nvmlInit: NVML Shared Library Not Found"


def test_examine(tmp_path):
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    fake = FakeNvml(Gpu(), Gpu("GPU-2", recovery_action=2), Gpu("GPU-3", errors={"nvmlDeviceGetTotalEccErrors": GPU_IS_LOST}))
    found = json.loads(json.dumps(operability.examine(environ, fake.library)))
    assert [(row["gpu"], row["ok"]) for row in found["gpus"]] == [(0, True), (1, False), (2, False)]
    assert found["gpus"][0]["reason"].endswith("MPS none, NVLinks up 18")
    assert found["gpus"][0]["links_up"] == list(range(18))
    assert "node reboot" in found["gpus"][1]["reason"]
    assert found["gpus"][2]["reason"] == "NVML, nvmlDeviceGetTotalEccErrors: GPU is lost"
    assert [0, 1, "write"] in found["peers"]
    (tmp_path / "control").write_text("")
    assert operability.examine(environ, fake.library)["reason"].startswith("expected no MPS")
