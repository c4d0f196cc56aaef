from __future__ import annotations

import re
from pathlib import Path

import kvtier_sdk.cli

_DIRECTORY = Path(kvtier_sdk.cli.__file__).parent
ALERT_RULES = (_DIRECTORY / "alert_rules.yml").read_text()
DASHBOARD = (_DIRECTORY / "dashboard.json").read_text()
ALERTS = re.findall(r"- alert: (\w+)", ALERT_RULES)
