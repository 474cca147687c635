"""Named shapes: what tests check and benchmarks measure, so that both speak of the same."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ParityShape:
    """A piece: `data_rows` rows of `row_words` words with `parity_rows` parity rows, in pages of `page_words` words."""

    name: str
    data_rows: int
    parity_rows: int
    row_words: int
    page_words: int

    @property
    def nbytes(self) -> int:
        return 4 * self.data_rows * self.row_words


@dataclasses.dataclass(frozen=True)
class UpdateShape:
    """A chunk of an Adam-like update: parameter, gradient and two moments, and a compute copy if it has a dtype.

    row: elements of a row. param, grad, moment, copy: dtypes by name.
    """

    name: str
    data_rows: int
    parity_rows: int
    row: int
    page_bytes: int
    param: str = "float32"
    grad: str = "float32"
    moment: str = "float32"
    copy: str | None = None

    @property
    def elements(self) -> int:
        return self.data_rows * self.row


# A few blocks each, for the interpreter.
SMALL_PARITY = (
    ParityShape("one_block", 4, 2, 512, 512),
    ParityShape("xor_only", 5, 1, 1024, 512),
    ParityShape("power_form", 8, 2, 2048, 1024),
    ParityShape("three_rows", 6, 3, 1024, 1024),
    ParityShape("four_rows", 8, 4, 1024, 512),
    ParityShape("wide_tiles", 4, 2, 4096, 2048),
)
SMALL_UPDATE = (
    UpdateShape("float32", 4, 2, 1024, 2048),
    UpdateShape("bfloat16", 4, 2, 2048, 2048, "bfloat16", "bfloat16", "bfloat16"),
    UpdateShape("master_and_copy", 4, 2, 2048, 2048, "float32", "bfloat16", "float32", "bfloat16"),
    UpdateShape("bfloat16_moments", 4, 1, 1024, 2048, "float32", "float32", "bfloat16"),
    UpdateShape("four_parity_rows", 5, 4, 512, 2048),
    UpdateShape("no_parity", 3, 0, 512, 2048),
)

# Pages as the device has them, a few MiB each.
_PAGE = 2 << 20
DEVICE_PARITY = tuple(
    ParityShape(f"d{d}_h{h}", d, h, pages * _PAGE // 4, _PAGE // 4)
    for d, h, pages in [(2, 1, 1), (8, 1, 2), (16, 2, 2), (32, 2, 1), (16, 3, 1), (16, 4, 2), (32, 4, 1)]
)
DEVICE_UPDATE = (
    UpdateShape("float32", 32, 2, 2 * _PAGE // 4, _PAGE),
    UpdateShape("bfloat16", 16, 2, _PAGE, _PAGE, "bfloat16", "bfloat16", "bfloat16"),
    UpdateShape("master_and_copy", 16, 2, _PAGE, _PAGE, "float32", "bfloat16", "float32", "bfloat16"),
    UpdateShape("four_parity_rows", 8, 4, _PAGE // 4, _PAGE),
)


def bandwidth_parity(data_rows: int, parity_rows: int, nbytes: int) -> ParityShape:
    """A piece of about `nbytes`, whole pages of 2 MiB in each row."""
    row_words = nbytes // data_rows // _PAGE * _PAGE // 4
    return ParityShape(f"d{data_rows}_h{parity_rows}", data_rows, parity_rows, row_words, _PAGE // 4)


def bandwidth_update(data_rows: int, parity_rows: int, elements: int, dtype: str = "float32") -> UpdateShape:
    """A chunk of about `elements` elements, all lanes of one dtype."""
    row = elements // data_rows // _PAGE * _PAGE
    return UpdateShape(f"d{data_rows}_h{parity_rows}_{dtype}", data_rows, parity_rows, row, _PAGE, dtype, dtype, dtype)
