"""Names, keywords and types as editors and `help` show them."""

import inspect
import pydoc

import warpfit


def test_the_package_lists_its_public_names_alone():
    shown = dir(warpfit)
    assert {"connect", "local", "Client", "testing", "__version__"} <= {*shown}
    assert not {"Any", "Final", "TYPE_CHECKING", "import_module"} & {*shown}
    assert all(getattr(warpfit, name) is not None for name in shown)


def test_methods_show_their_keywords_in_a_few_lines():
    for name in ("upload", "open", "evaluate", "run", "optimize", "simplify", "propose"):
        shown = inspect.signature(getattr(warpfit.Client, name))
        assert "options" not in shown.parameters, name
        head = pydoc.render_doc(getattr(warpfit.Client, name), renderer=pydoc.plaintext)
        assert len(head.splitlines()[2]) < 1600, name
        assert "_SupportsArray" not in head
        assert "ForwardRef" not in head
