"""python -m k3svc.cli"""

from k3svc.cli.main import main

main()
