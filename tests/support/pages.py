"""What a page that ``batchkit report`` wrote holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def data_in(page: Path) -> Any:
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])
