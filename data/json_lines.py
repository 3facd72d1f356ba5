"""JSON lines in plain, .gz and .zst files, and the documents that bifocal reads from them.

A document is {"messages": [{"role", "content"}..]}, {"prompt", "completion"} (texts, or lists of messages)
or {"text"}.
"""

import contextlib
import gzip
import io
import json
import os
import shutil
import subprocess
import zlib

try:
    import zstandard
except ImportError:
    zstandard = None

ZSTD_ERRORS = () if zstandard is None else (zstandard.ZstdError,)
ROLES = ("system", "user", "assistant")


class DataError(Exception):
    """What a person can act on; str() names the place."""


def require(condition, message):
    if not condition:
        raise DataError(message)


@contextlib.contextmanager
def zstd_command(arguments, path, **streams):
    """The command zstd, for a Python without the package zstandard."""
    require(shutil.which("zstd"), f"[{path}] needs the Python package zstandard or the command zstd")
    command = ["zstd", "-q", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, **streams) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise
        errors = process.stderr.read().decode(errors="replace").strip()
    require(process.returncode == 0, f"[{path}] zstd failed: {errors}")


@contextlib.contextmanager
def open_text(path):
    """A UTF-8 text to read, unpacked by the name's ending."""
    name = str(path)
    if name.endswith(".gz"):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield file
    elif name.endswith(".zst") and zstandard is not None and not shutil.which("zstd"):
        # The command comes first: the package takes a file that was cut for one that ends.
        with open(path, "rb") as packed, zstandard.ZstdDecompressor().stream_reader(
            packed, read_across_frames=True
        ) as stream, io.TextIOWrapper(stream, encoding="utf-8") as file:
            yield file
    elif name.endswith(".zst"):
        with open(path, "rb") as packed, zstd_command(
            ["-dc"], path, stdin=packed, stdout=subprocess.PIPE
        ) as process, io.TextIOWrapper(process.stdout, encoding="utf-8") as file:
            yield file
    else:
        with open(path, encoding="utf-8") as file:
            yield file


@contextlib.contextmanager
def pack_text(path, name):
    if name.endswith(".gz"):
        # No name and no time inside: equal input gives equal bytes.
        with open(path, "wb") as packed, gzip.GzipFile("", "wb", 9, packed, mtime=0) as stream:
            with io.TextIOWrapper(stream, encoding="utf-8") as file:
                yield file
    elif name.endswith(".zst") and zstandard is not None:
        with open(path, "wb") as packed, zstandard.ZstdCompressor(12).stream_writer(packed) as stream:
            with io.TextIOWrapper(stream, encoding="utf-8", write_through=True) as file:
                yield file
    elif name.endswith(".zst"):
        with open(path, "wb") as packed, zstd_command(
            ["-12", "-c"], name, stdin=subprocess.PIPE, stdout=packed
        ) as process:
            with io.TextIOWrapper(process.stdin, encoding="utf-8") as file:
                yield file
    else:
        with open(path, "w", encoding="utf-8") as file:
            yield file


@contextlib.contextmanager
def create_text(path):
    """A UTF-8 text to write, packed by the name's ending. It appears only when it is whole."""
    require(not os.path.exists(path), f"[{path}] is there already; remove it or give another name")
    partial = f"{path}.partial"
    try:
        with pack_text(partial, str(path)) as file:
            yield file
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)
        raise
    os.replace(partial, path)


def read_objects(path):
    """Pairs of a place ("FILE:LINE") and the object on that line; blank lines are passed over."""
    with open_text(path) as file:
        number = 0
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                value = json.loads(line)
                require(isinstance(value, dict), f"[{path}:{number}] wanted a JSON object")
                yield f"{path}:{number}", value
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise DataError(f"[{path}:{number or 1}] wanted a JSON object: {error}") from error
        except (OSError, EOFError, zlib.error, *ZSTD_ERRORS) as error:
            raise DataError(f"[{path}:{number + 1}] cannot be read: {error}") from error


def check_document(place, document):
    """Returns the document if bifocal can read it."""
    def text(key, value):
        require(isinstance(value, str), f"[{place}] wanted a text as {key}, came {value!r:.80}")
        # A lone surrogate has no UTF-8.
        with_utf8 = value.encode("utf-8", errors="replace").decode("utf-8") == value
        require(with_utf8, f"[{place}] {key} holds half a surrogate pair")

    def messages(key, value):
        require(isinstance(value, list) and value, f"[{place}] wanted a list of messages as {key}")
        for message in value:
            require(
                isinstance(message, dict) and set(message) == {"role", "content"},
                f"[{place}] wanted role and content in a message, came {message!r:.80}",
            )
            role = message["role"]
            require(role in ROLES, f"[{place}] wanted one of the roles {ROLES}, came {role!r}")
            text("content", message["content"])

    keys = set(document)
    if keys == {"messages"}:
        messages("messages", document["messages"])
    elif keys == {"prompt", "completion"}:
        check = messages if isinstance(document["prompt"], list) else text
        check("prompt", document["prompt"])
        check("completion", document["completion"])
    elif keys == {"text"}:
        text("text", document["text"])
    else:
        raise DataError(f"[{place}] wanted messages, prompt and completion, or text; came {sorted(keys)}")
    return document


def write_document(file, document):
    file.write(json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n")
