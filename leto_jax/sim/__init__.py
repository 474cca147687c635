"""Large-scale simulation of training under failures: Leto and the systems beside it, from one machine to 131,072 GPUs.

A workload (`load_workload`) and a system (`find_system`) give a `Plan` in a `Setting`; `draw_runs` draws failures, `study` plays them.

    workload = with_iteration_time(load_workload("deepseek-v4"))
    setting = Setting(workload, Costs(), mttf_secs=14 * 60, hof_ratio=0.5)
    runs = draw_runs(FailureModel(mttf_secs=14 * 60), workload.gpus, horizon_secs=30 * 86_400, seeds=20)
    outcome = study(plan(find_system("leto"), setting), runs, horizon_secs=30 * 86_400)

NumPy only: no process is started, JAX is not imported, equal seeds give equal numbers.
"""

from leto_jax.sim.costs import Costs
from leto_jax.sim.failures import Failure, FailureModel, Kind
from leto_jax.sim.loop import Ledger, run
from leto_jax.sim.plan import Cause, Cycle, Plan, Recovery, Resume
from leto_jax.sim.predict import iteration_time, with_iteration_time
from leto_jax.sim.study import Outcome, draw_runs, study
from leto_jax.sim.system import Checkpoint, Setting, System, assumptions, plan
from leto_jax.sim.systems import SYSTEMS, find_system
from leto_jax.sim.trace import read_trace
from leto_jax.sim.tuner import Recommendation, recommend
from leto_jax.sim.workload import Workload, known_workloads, load_workload, scaled

__all__ = [
    "SYSTEMS",
    "Cause",
    "Checkpoint",
    "Costs",
    "Cycle",
    "Failure",
    "FailureModel",
    "Kind",
    "Ledger",
    "Outcome",
    "Plan",
    "Recommendation",
    "Recovery",
    "Resume",
    "Setting",
    "System",
    "Workload",
    "assumptions",
    "draw_runs",
    "find_system",
    "iteration_time",
    "known_workloads",
    "load_workload",
    "plan",
    "read_trace",
    "recommend",
    "run",
    "scaled",
    "study",
    "with_iteration_time",
]
