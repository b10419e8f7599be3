"""``danube doctor`` looks at a real broker: its ports, its processes and its files (row S57)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests import fork_server
from tests.broker_process import ROOT, BrokerProcess
from tests.certificates import Authority


def verdicts(broker: BrokerProcess, **environment: str) -> dict[str, str]:
    words = [sys.executable, "-m", "danube", "doctor", "--data-dir", str(broker.data_dir), "-o", "json"]
    done = fork_server.run(words, cwd=ROOT, environment={**os.environ, **environment})
    found = {one["row"]: one["verdict"] for one in json.loads(done.stdout)}
    assert done.returncode == (10 if "fail" in found.values() else 0), done.stderr
    return found


def test_a_broker_for_this_host_alone(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", workers=2) as broker:
        found = verdicts(broker)
        assert found["S1"] == found["S24"] == "pass" and found["S18"] == "-"
        assert found["S25"] == "fail" or os.geteuid() != 0
        (broker.data_dir / "planted").symlink_to("/etc/passwd")
        assert verdicts(broker)["S24"] == "fail"


def test_a_broker_that_others_reach(tmp_path: Path) -> None:
    files = Authority(tmp_path / "tls").sign("server", "IP:127.0.0.1")
    served = {"DANUBE_TLS__CERT_FILE": files.cert_file, "DANUBE_TLS__KEY_FILE": files.key_file}
    open_to_all = {"DANUBE_SERVER__HOST": "0.0.0.0", "DANUBE_SERVER__INSECURE": "true"}
    with BrokerProcess(tmp_path / "open", workers=1, host="0.0.0.0") as broker:
        found = verdicts(broker, **open_to_all)
        assert found["S1"] == found["S19"] == found["S32"] == "fail"
    with BrokerProcess(tmp_path / "data", workers=1, host="0.0.0.0", environment=served) as broker:
        found = verdicts(broker, **open_to_all, **served)
        assert found["S18"] == found["S22"] == "pass" and found["S1"] == "fail", "it asks nobody who they are"
