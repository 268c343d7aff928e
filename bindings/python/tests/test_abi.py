"""_abi.py agrees with what a C compiler makes of frugal.h: constants, sizes, offsets, defaults, names."""

from __future__ import annotations

import ctypes
import re
import subprocess
from ctypes import addressof, sizeof
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from frugal import _abi
from frugal._lib import lib

REPOSITORY = Path(__file__).resolve().parents[3]
HEADER = REPOSITORY / "include" / "frugal.h"
STRUCTS: Dict[str, Any] = {
    name: value
    for name, value in vars(_abi).items()
    if isinstance(value, type) and issubclass(value, ctypes.Structure) and value is not ctypes.Structure
}
INITIALIZED = {
    "frugal_config": "FRUGAL_CONFIG_INIT",
    "frugal_optimizer": "FRUGAL_OPTIMIZER_INIT",
    "frugal_table_config": "FRUGAL_TABLE_CONFIG_INIT",
    "frugal_trainer_config": "FRUGAL_TRAINER_CONFIG_INIT",
    "frugal_op": "FRUGAL_OP_INIT",
    "frugal_folder_config": "FRUGAL_FOLDER_CONFIG_INIT",
    "frugal_checkpoint_config": "FRUGAL_CHECKPOINT_CONFIG_INIT",
    "frugal_restore_config": "FRUGAL_RESTORE_CONFIG_INIT",
}


def header() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)


def constants() -> Dict[str, int]:
    ours = {n: v for n, v in vars(_abi).items() if n.startswith("FRUGAL_") and isinstance(v, int)}
    return {**ours, **_abi.STATUS}


def leaves(struct: Any, prefix: str = "", start: int = 0) -> Iterator[Tuple[str, int, int]]:
    """Yields path, offset and size of each field that is not a struct. Between the fields of structs is padding."""
    for field in struct._fields_:
        place = getattr(struct, field[0])
        if isinstance(field[1], type) and issubclass(field[1], ctypes.Structure):
            yield from leaves(field[1], f"{prefix}{field[0]}.", start + place.offset)
        else:
            yield prefix + field[0], start + place.offset, place.size


@pytest.fixture(scope="module")
def facts(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Dict[str, str]:
    """The lines NAME=VALUE that a C program prints."""
    lines: List[str] = []
    for name in constants():
        # Only unsigned values need 64 bits; the others are printed with their sign.
        lines.append(f'printf("{name}=%s%llu\\n", ({name}) < 0 ? "-" : "", ({name}) < 0 ? -(unsigned long long)({name})'
                     f' : (unsigned long long)({name}));')  # fmt: skip
    for name, struct in STRUCTS.items():
        lines.append(f'printf("sizeof {name}=%zu\\n", sizeof(struct {name}));')
        for field in struct._fields_:
            lines.append(f'printf("{name}.{field[0]}=%zu,%zu\\n", offsetof(struct {name}, {field[0]}), '
                         f'sizeof(((struct {name} *)0)->{field[0]}));')  # fmt: skip
    for name, macro in INITIALIZED.items():
        lines.append(f"{{ {name} value; memset(&value, 0, sizeof value); {name} set = {macro}; value = set;")
        for path, _, _ in leaves(getattr(_abi, name)):
            lines.append(f'printf("init {name}.{path}="); dump(&value.{path}, sizeof value.{path});')
        lines.append("}")
    folder = tmp_path_factory.mktemp("abi")
    source = folder / "facts.c"
    source.write_text(
        "#include <frugal.h>\n#include <stdio.h>\n#include <string.h>\n"
        "static void dump(const void *at, size_t size) { const unsigned char *b = at; size_t i;\n"
        '  for (i = 0; i < size; ++i) printf("%02x", b[i]); printf("\\n"); }\n'
        "int main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n"
    )
    program = folder / "facts"
    subprocess.run([compiler, "-std=c99", f"-I{HEADER.parent}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return dict(line.split("=", 1) for line in printed.splitlines())


def test_every_constant_of_the_header_is_there_with_its_value(facts: Dict[str, str]) -> None:
    names = set(re.findall(r"^#define (FRUGAL_\w+) ", header(), re.M))
    names |= set(re.findall(r"(?:^  |{ )(FRUGAL_\w+) =", header(), re.M))
    names = {n for n in names if not n.endswith("_INIT") and n not in ("FRUGAL_API", "FRUGAL_H")}
    versions = {"FRUGAL_VERSION_MAJOR", "FRUGAL_VERSION_MINOR", "FRUGAL_VERSION_PATCH"}
    assert names - versions == set(constants())
    for name, value in constants().items():
        assert int(facts[name]) == value, name
    for name, value in zip(("MAJOR", "MINOR", "PATCH"), _abi.VERSION):
        assert re.search(rf"#define FRUGAL_VERSION_{name} {value}\n", header())


def test_structs_have_the_sizes_and_offsets_of_c(facts: Dict[str, str]) -> None:
    assert set(STRUCTS) == set(re.findall(r"^typedef struct (frugal_\w+) \{", header(), re.M))
    for name, struct in STRUCTS.items():
        assert int(facts[f"sizeof {name}"]) == sizeof(struct), name
        body = re.search(rf"typedef struct {name} {{(.*?)}} {name};", header(), re.S)
        assert body is not None
        declared = re.findall(r"(\w+)(?:\[\d+\])?;", body[1])
        assert declared == [field[0] for field in struct._fields_], name
        for field in struct._fields_:
            place = getattr(struct, field[0])
            assert facts[f"{name}.{field[0]}"] == f"{place.offset},{place.size}", field[0]


@pytest.mark.parametrize("name", INITIALIZED)
def test_defaults_are_those_of_the_init_macros(facts: Dict[str, str], name: str) -> None:
    value = getattr(_abi, name)()
    getattr(lib, name + "_init")(addressof(value))
    for path, offset, size in leaves(type(value)):
        assert facts[f"init {name}.{path}"] == ctypes.string_at(addressof(value) + offset, size).hex(), path


def test_the_packed_op_is_the_struct() -> None:
    values = list(range(1, len(_abi.frugal_op._fields_) + 1))
    op = _abi.frugal_op.from_buffer_copy(_abi.OP.pack(*values))
    assert [getattr(op, field[0]) for field in op._fields_] == values
    assert _abi.OP.size == _abi.BATCH_OP.size == sizeof(_abi.frugal_op)
    op = _abi.frugal_op.from_buffer_copy(_abi.BATCH_OP.pack(1, 2, 3, 4, 5, 6))
    told = {field[0]: getattr(op, field[0]) for field in op._fields_ if getattr(op, field[0])}
    assert told == {"struct_size": 1, "table": 2, "batch": 3, "rows_out": 4, "grads": 5, "row_stride": 6}


def test_every_function_of_the_header_is_bound_with_its_arguments() -> None:
    types = {"int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64,
             "uint64_t": ctypes.c_uint64, "size_t": ctypes.c_size_t}  # fmt: skip
    found = re.findall(r"FRUGAL_API ([\w ]+?[ *]+)(frugal_\w+)\((.*?)\);", header(), re.S)
    assert {name for _, name, _ in found} == set(_abi.FUNCTIONS)
    for result, name, arguments in found:
        ours_result, ours = _abi.FUNCTIONS[name]
        result = result.strip()
        assert ours_result == {"void": None, "const char *": ctypes.c_char_p, "int32_t": ctypes.c_int32}[result], name
        theirs = [] if arguments == "void" else [" ".join(a.split()) for a in arguments.split(",")]
        assert len(theirs) == len(ours), name
        for text, kind in zip(theirs, ours):
            if "*" in text:
                assert kind in (ctypes.c_void_p, ctypes.c_char_p), (name, text)
            else:
                assert kind == types[text.rsplit(" ", 1)[0]], (name, text)
