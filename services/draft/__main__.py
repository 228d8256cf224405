"""The draft role. There is no drafter in this version, so the role says so and does not start."""

import sys

from k3svc.rpc.process import EXIT_START_UP


def main() -> int:
    sys.stderr.write("draft: this version of k3svc has no drafter; decode services run without one\n")
    return EXIT_START_UP


if __name__ == "__main__":
    sys.exit(main())
