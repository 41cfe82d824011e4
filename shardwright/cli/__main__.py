import sys

from shardwright.cli import main

sys.exit(main())
