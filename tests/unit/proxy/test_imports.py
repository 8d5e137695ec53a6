from __future__ import annotations

import subprocess
import sys


def test_the_proxy_imports_no_torch_no_transformers_and_no_kubernetes():
    program = (
        "import flowprefill.proxy.main, sys;"
        "print([m for m in ('torch', 'transformers', 'kopf', 'kubernetes') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
