"""Loads and stores of shared words in an order that other processes see, for processors that keep none."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from danube.core.kernels import linking
from danube.core.kernels.entries import PREFIX, add_entry


def compile_words() -> Any:
    """Return load(address), store(address, value) and fence(), made of LLVM's atomic instructions at once."""
    binding, ir = import_module("llvmlite.binding"), import_module("llvmlite.ir")
    machine = linking.target_machine()
    module = ir.Module("danube.words")
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    word = ir.IntType(64)

    def place(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, word.as_pointer())

    def load(builder: Any, values: list[Any]) -> tuple[Any, Any]:
        return None, builder.load_atomic(place(builder, values[0]), "acquire", 8)

    def store(builder: Any, values: list[Any]) -> tuple[Any, Any]:
        return None, builder.store_atomic(values[1], place(builder, values[0]), "release", 8)

    def fence(builder: Any, values: list[Any]) -> tuple[Any, Any]:
        return None, builder.fence("seq_cst")

    # They keep the GIL: giving it up would cost more than they do.
    add_entry(module, f"{PREFIX}load", ["uint64"], "uint64", load, keeps_gil=True)
    add_entry(module, f"{PREFIX}store", ["uint64", "uint64"], "none", store, keeps_gil=True)
    add_entry(module, f"{PREFIX}fence", [], "none", fence, keeps_gil=True)
    code = machine.emit_object(binding.parse_assembly(str(module)))
    return linking.link(code, ("load", "store", "fence"))
