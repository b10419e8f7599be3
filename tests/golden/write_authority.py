"""Write docs/operations.md and the matrix of rights anew: ``python -m tests.golden.write_authority``.

The difference of the matrix is reviewed line by line: each is a right that somebody gains or loses.
"""

from __future__ import annotations

from tests.golden.authority_cases import MATRIX, OPERATIONS_PAGE, matrix, operations_page


def main() -> None:
    OPERATIONS_PAGE.write_text(operations_page(), encoding="utf-8")
    MATRIX.write_text(matrix(), encoding="utf-8")


if __name__ == "__main__":
    main()
