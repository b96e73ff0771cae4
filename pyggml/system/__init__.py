"""What depends on the operating system, one file per subject: other rooms ask here and know no system by name. C's part
is csrc/os."""

from .machine import check_machine

check_machine()
