"""Runtime directories: private or refused, with what was found."""

from __future__ import annotations

import os
import stat

import pytest

from leto_jax.errors import JobError, UsageError
from leto_jax.manager import protocol, runtime


def test_root_is_xdg_if_that_is_ours(tmp_path):
    assert runtime.runtime_root({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "leto"
    fallback = runtime.runtime_root({})
    assert str(fallback) == f"/tmp/leto-{os.geteuid()}"
    assert runtime.runtime_root({"XDG_RUNTIME_DIR": ""}) == fallback
    assert runtime.runtime_root({"XDG_RUNTIME_DIR": str(tmp_path / "missing")}) == fallback
    (tmp_path / "file").write_text("")
    assert runtime.runtime_root({"XDG_RUNTIME_DIR": str(tmp_path / "file")}) == fallback


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_root_is_not_xdg_of_another_user(tmp_path):
    os.chown(tmp_path, 65534, 65534)
    assert str(runtime.runtime_root({"XDG_RUNTIME_DIR": str(tmp_path)})) == "/tmp/leto-0"


@pytest.mark.parametrize("job", ["", ".", "..", "a/b", "a b", "x" * 65, "ü", "a\n", None])
def test_job_names_are_validated(job):
    with pytest.raises(UsageError, match=r"a job name is 1 to 64 of the characters"):
        runtime.check_job_name(job)


def test_job_dir(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert runtime.job_dir("a.B_1-x", environ) == tmp_path / "leto" / "a.B_1-x"
    assert not (tmp_path / "leto").exists()
    assert runtime.ensure_job_dir("j", environ) == tmp_path / "leto" / "j"
    assert stat.S_IMODE(os.stat(tmp_path / "leto").st_mode) == 0o700
    assert stat.S_IMODE(os.stat(tmp_path / "leto" / "j").st_mode) == 0o700


def test_a_path_that_is_too_long_for_a_socket_is_named_early(tmp_path):
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    with pytest.raises(UsageError, match=r"socket path .*manager.sock is [0-9]+ bytes long, the limit of AF_UNIX is 107"):
        runtime.job_dir("j" * 64, {"XDG_RUNTIME_DIR": str(deep)})


def test_ensure_private_dir_ignores_the_umask(tmp_path):
    old = os.umask(0o777)
    try:
        path = runtime.ensure_private_dir(tmp_path / "d")
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert runtime.ensure_private_dir(path) == path


def test_ensure_private_dir_says_what_it_found(tmp_path):
    open_dir = tmp_path / "open"
    open_dir.mkdir()
    open_dir.chmod(0o755)
    with pytest.raises(JobError, match=rf"expected a directory with mode 0700 of uid {os.geteuid()} .*found mode 0755: .*chmod 700"):
        runtime.ensure_private_dir(open_dir)
    link = tmp_path / "link"
    link.symlink_to(runtime.ensure_private_dir(tmp_path / "target"))
    with pytest.raises(JobError, match="found a symbolic link"):
        runtime.ensure_private_dir(link)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(JobError, match="found a symbolic link"):
        runtime.ensure_private_dir(dangling)
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match="found -rw"):
        runtime.ensure_private_dir(tmp_path / "file")
    with pytest.raises(JobError, match=r"cannot create .*: .*missing does not exist"):
        runtime.ensure_private_dir(tmp_path / "missing" / "d")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_ensure_private_dir_refuses_another_owner(tmp_path):
    path = runtime.ensure_private_dir(tmp_path / "d")
    os.chown(path, 65534, 65534)
    with pytest.raises(JobError, match=r"expected .* of uid 0 .*, found one of uid 65534"):
        runtime.ensure_private_dir(path)


def test_live_jobs_skips_what_does_not_answer_and_removes_nothing(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert runtime.live_jobs(environ) == []
    for job in ("empty", "dead", "mute", "not a job"):
        (tmp_path / "leto" / job).mkdir(parents=True)
    dead, _ = protocol.listen(tmp_path / "leto" / "dead" / runtime.SOCKET_NAME)
    dead.close()
    mute, _ = protocol.listen(tmp_path / "leto" / "mute" / runtime.SOCKET_NAME)
    (tmp_path / "leto" / "link").symlink_to(tmp_path / "leto" / "mute")
    with mute:
        assert runtime.live_jobs(environ) == []
    assert (tmp_path / "leto" / "dead" / runtime.SOCKET_NAME).exists()
