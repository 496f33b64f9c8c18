"""In somebody else's process: scripts end as they should whatever still runs, and notebooks work, are interrupted
and go on.
"""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

SRC = str(Path(__file__).parents[3] / "src")
PRELUDE = """
import asyncio, sys
from anabranch.lang import api as ab
from anabranch.lang.testing import Gate, Reply, ScriptedBackend
never = Gate()
backend = ScriptedBackend(lambda p: Reply("begun ", never) if "slow" in p.text else "quick")
ab.set_default_backend(backend)

@ab.function
def program(s, text):
    s += text + ab.gen("x")
    s["x"]

@ab.function
async def aprogram(s, text):
    s += text
    await s.gen("x")
"""


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    script = PRELUDE + textwrap.dedent(body)
    env = {"PYTHONPATH": SRC, "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script], env=env, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("state = program.run('quick')", 0),
        ("state = program.run('slow', stream=True)\nprint(next(state.text_iter()))", 0),
        ("results = program.run_batch([['quick'], ['slow'], ['slow']], generator_style=True)\nnext(results)", 0),
        ("results = aprogram.run_batch([['quick'], ['slow']], generator_style=True)\nnext(results)", 0),
        ("s = ab.state()\ns += 'slow' + ab.gen('x')\ncycle = [s]\ncycle.append(cycle)\nsys.exit(3)", 3),
        ("group = ab.state().fork(3)\ngroup += 'slow' + ab.gen('x')\nraise KeyError('mine')", 1),
    ],
)
def test_a_script_ends_at_once_with_its_own_code_whatever_still_runs(body: str, code: int) -> None:
    done = run_script(body)
    assert done.returncode == code, done.stderr
    assert code == 1 or not done.stderr, done.stderr


def test_importing_the_package_and_the_language_is_light() -> None:
    heavy = ("torch", "numpy", "transformers", "zmq", "pydantic", "IPython", "tqdm")
    script = f"""
    import anabranch.lang.api
    assert not set({heavy!r}) & set(sys.modules), set({heavy!r}) & set(sys.modules)
    """
    done = run_script(script)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def kernel() -> Any:
    pytest.importorskip("ipykernel")
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(
        kernel_name="python3", env={"PYTHONPATH": SRC, "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    )
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def cell(client: Any, code: str) -> str:
    """Run a cell; its text output. An error in it is raised."""
    reply: list[str] = []

    def hook(message: Any) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            reply.append(content["text"])
        elif message["msg_type"] in ("execute_result", "display_data"):
            reply.append(str(content["data"]))
        elif message["msg_type"] == "error":
            reply.append(f"ERROR {content['ename']}")

    client.execute_interactive(code, timeout=60, output_hook=hook, allow_stdin=False)
    return "".join(reply)


@pytest.mark.filterwarnings("default")
def test_a_notebook_runs_programs_sync_async_and_streaming_is_interrupted_and_goes_on(kernel: Any) -> None:
    manager, client = kernel
    assert cell(client, PRELUDE) == ""
    assert cell(client, "print(program.run('quick')['x'], aprogram.run('quick')['x'])") == "quick quick\n"
    assert cell(client, "state = await aprogram.arun('quick')\nprint(state['x'])") == "quick\n"
    assert (
        cell(client, "for piece in program.run('quick', stream=True).text_iter(): print(piece, end='|')")
        == "quick|quick|"
    )
    shown = cell(client, "state")
    assert "text/html" in shown and "written by the model" in shown
    client.execute("print('waiting', flush=True); program.run('slow')")
    while client.get_iopub_msg(timeout=30)["msg_type"] != "stream":
        pass
    manager.interrupt_kernel()
    reply = client.get_shell_msg(timeout=30)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    after = "print(backend.stats().result()['waiting_ops'], program.run('quick')['x'], (await aprogram('quick'))['x'])"
    assert cell(client, after) == "0 quick quick\n"
