"""Which rank goes where when a device cannot go on."""

from leto_jax.agent.spares import Spares


def test_on_the_cpu_a_spare_is_other_memory():
    spares = Spares(2, 2)
    for _ in range(2):
        assert spares.can_move((), 0) == ""
        assert spares.move((), 0) == []
    assert spares.can_move((), 0) == "none is left"
    assert spares.gpus == [0, 1]


def test_a_rank_on_a_bad_gpu_takes_the_next_one_and_no_gpu_is_used_again():
    spares = Spares(3, 2)
    assert spares.can_move({1}, 4) == ""
    assert spares.move({1}, 4) == [1]
    assert (spares.gpus, spares.left) == ([0, 2], 2)
    assert spares.move({0}, 4) == [0]
    assert spares.gpus == [3, 2]
    assert spares.can_move({2}, 4) == "expected 1 more GPUs for the job, found 0 (CUDA_VISIBLE_DEVICES)"


def test_a_state_beyond_repair_stays_on_its_gpu():
    spares = Spares(1, 1)
    assert spares.can_move((), 1) == ""
    assert spares.move((), 1) == []
    assert (spares.gpus, spares.left) == ([0], 0)


def test_more_bad_gpus_than_spares():
    spares = Spares(1, 2)
    assert spares.can_move({0, 1}, 8) == "2 GPUs cannot go on, 1 spares are left"


def test_none_was_asked_for():
    assert Spares(0, 1).can_move((), 8) == "there is none; start with --spares 1 and --checkpoint-every or --copy-every"
