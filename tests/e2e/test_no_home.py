"""A broker of a user who has no home, where only its data directory can be written."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import danube.sync
from danube.core.kernels import cache, jit
from tests.broker_process import BrokerProcess

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(jit.reason), reason=jit.reason)]

USER = 61_234  # no table names it; it may read all, as the Python of the tests may lie in another's home
COMPILING = "compiling kernels beside the broker"
NAMESPACE = """
mount --bind "$0" "$0" || exit 99
if [ "$1" = without ]; then mount -t tmpfs -o ro none "$2" || exit 99; fi
shift 2
mount -o remount,bind,ro / || exit 99
for place in /tmp /var/tmp /dev/shm; do
    if mountpoint -q $place; then mount -o remount,bind,ro $place || exit 99; fi
done
exec "$@"
"""


def confined(directory: Path, kernels: str) -> list[str]:
    """Words before a command, which then can write to this directory alone."""
    return [
        *("unshare", "--mount", "sh", "-c", NAMESPACE, str(directory), kernels, cache.folders()[0]),
        *("env", "-u", "HOME", "-u", "XDG_CACHE_HOME", "-u", "NUMBA_CACHE_DIR"),
        *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--pdeathsig=KILL"),
        *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
    ]


def possible(prefix: list[str]) -> bool:
    """Whether this user may make such a place."""
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("setpriv")):
        return False
    return subprocess.run([*prefix, "true"], capture_output=True).returncode == 0


@pytest.mark.parametrize("kernels", ["with", "without"])
def test_a_user_without_a_home_starts_a_broker(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels beside the code, as an image has them, and without any."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    own = tmp_path / "own"
    own.mkdir()
    prefix = confined(own, kernels)
    if not possible(prefix):
        pytest.skip("needs root, unshare and setpriv, and leave to mount")
    os.chown(own, USER, USER)
    refused = subprocess.run([*prefix, "touch", "/tmp/written"], capture_output=True, text=True)
    assert "Read-only file system" in refused.stderr
    with (
        BrokerProcess(own / "data", prefix=prefix) as process,
        danube.sync.connect(process.address) as client,
    ):
        with client.producer("/default/homeless") as producer:
            producer.send_many([b"%d" % number for number in range(100)])
        with client.consumer("/default/homeless", "all", start="earliest") as consumer:
            found = [int(consumer.receive(timeout=30).payload) for _ in range(100)]
        assert found == list(range(100))
        if kernels == "without":
            assert COMPILING in process.output_path.read_text()
        assert process.stop() == 0
