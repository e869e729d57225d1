"""The API process is light: it starts fast because it never loads torch."""

from __future__ import annotations

import subprocess
import sys

CHECK = """
import sys
import trnc.serve.app, trnc.serve.launch, trnc.serve.model
from trnc.serve.openai import chat, completions, models, router
from trnc.serve.info import router, serving
from trnc.serve.sglang import router, serving
from trnc.serve.tokens import router, serving
from trnc.serve.admin import router, serving
heavy = {"torch", "transformers"} & set(sys.modules)
assert not heavy, heavy
allowed = ("trnc.serve", "trnc.checkpoint", "trnc.core", "trnc.errors", "trnc.engine.messages")
ours = [name for name in sys.modules if name.startswith("trnc.")]
others = [n for n in ours if not n.startswith(allowed) and n != "trnc.engine"]
assert not others, others
"""

ROLES_CHECK = """
import sys
import trnc.serve.app
from trnc.serve.roles import ROUTERS
loaded = [role for role in ROUTERS if f"trnc.serve.{role}" in sys.modules]
assert not loaded, loaded
"""


def test_the_api_process_never_imports_torch():
    subprocess.run([sys.executable, "-c", CHECK], check=True)


def test_a_role_loads_only_its_own_routers():
    subprocess.run([sys.executable, "-c", ROLES_CHECK], check=True)
