"""What ptxas makes of our kernels for an H100 or H200: no uniform register is read that nothing wrote."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from machine_code import PARTS, unwritten_registers

FAULTY = """
        /*0c90*/                   ULEA UR20, UR4, UR20, 0x18 ;
        /*3260*/                   UMOV UR26, UR22 ;
        /*3290*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR24].tnspA.tnspB, RZ, !UPT ;
        /*32a0*/                   UIADD3 UR4, UP0, UR21, 0x40, URZ ;
"""
"""Of the backward pass of 32 queries and 64 keys, as it was compiled before: UR21 occurs nowhere else."""


def test_registers_that_nothing_wrote_are_found():
    written = "".join(f"/*0000*/ UMOV UR{number}, 0x400 ;\n" for number in (4, 20, 22, 24, 25, 27))
    assert unwritten_registers(written + FAULTY) == ["UIADD3 UR4, UP0, UR21, 0x40, URZ"]
    assert unwritten_registers(written + "/*0000*/ @!UP1 UMOV UR21, URZ ;\n" + FAULTY) == []
    in_registers = "/*0000*/ HGMMA.64x64x16.F32.BF16 R48, R24, gdesc[UR24].tnspB, RZ, !UPT ;"
    assert unwritten_registers("/*0000*/ UIADD3.64 UR26, UR26, 0x2, URZ ;" + in_registers) == [
        "UIADD3.64 UR26, UR26, 0x2, URZ"
    ]  # and not the product, whose first matrix is in registers: it has no descriptor in UR24


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("part", PARTS)
def test_compiled_kernels_read_what_was_written(part, tmp_path):
    script = Path(__file__).parent.parent / "machine_code.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(script.parent.parent)}
    ran = subprocess.run([sys.executable, script, part], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    kernels = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(kernels) >= 8
    assert [kernel for kernel in kernels if kernel["faults"]] == []
