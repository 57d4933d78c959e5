"""What the package brings to sparsellm. Import strings, so that no command line waits for torch."""

from sparsellm.extension import Extension

EXTENSION = Extension(
    methods={"ria": "my_pruner.ria:RIA", "in-order": "my_pruner.in_order:InOrder"},
    patterns={"shared-nm": "my_pruner.shared_nm:SharedNM"},
)
