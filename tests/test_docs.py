"""The Python blocks of the README and of docs/ run, in order, in one namespace a page."""

import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def before_the_readme():
    """What the README's TorchRL snippet takes as given."""
    rollouts = pytest.importorskip("rollouts")
    import torch

    actor, critic = rollouts.ACTORS["Categorical"](), rollouts.critic()
    parameters = [*actor.parameters(), *critic.parameters()]
    return {
        "actor": actor,
        "critic": critic,
        "collector": [rollouts.rollout(actor, 2, 10) for _ in range(2)],
        "optimizer": torch.optim.SGD(parameters, lr=0.1),
    }


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_page(page):
    pytest.importorskip("torchrl")
    pytest.importorskip("gymnasium")
    namespace = before_the_readme() if page == "README.md" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks(page):
            exec(compile(block, page, "exec"), namespace)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_what_a_page_links_to_is_there(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text())
    assert not [link for link in links if not ((ROOT / page).parent / link).exists()]


def test_the_core_example_in_the_docstring():
    import doctest

    from vtrace_plugins._core import api

    failed, tried = doctest.testmod(api)
    assert tried and not failed
