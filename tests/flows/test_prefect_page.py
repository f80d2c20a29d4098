"""What a person does on Prefect's page: open a deployment, fill its form, start it, see it Completed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import yaml

from configs import presets
from configs.home import PROJECT_ROOT, Home
from configs.platform import PlatformAddresses
from configs.requests import CollectRequest, EvaluateRequest, PretrainRequest
from configs.workload import WorkloadSpec
from storage.demonstrations import LeRobotWriter

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
FLOWS = ("platform", "train", "preprocess", "sft", "rl", "evaluate", "collect", "export", "pretrain")


def deployments() -> dict[str, dict[str, Any]]:
    """Deployments of prefect.yaml by name."""
    declared = yaml.safe_load((PROJECT_ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    return {deployment["name"]: deployment for deployment in declared}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six short episodes of noise with the widths that the form's preset has."""
    root = tmp_path_factory.mktemp("datasets") / "noise"
    rng = np.random.default_rng(0)
    with LeRobotWriter(root, fps=20, cameras={"base": (64, 64)}, state_width=25, action_width=4) as writer:
        for _ in range(6):
            writer.add_episode(
                images={"base": rng.integers(0, 256, (5, 64, 64, 3), dtype=np.uint8)},
                state=rng.normal(size=(5, 25)).astype(np.float32),
                action=rng.normal(size=(5, 4)).astype(np.float32),
                task="push the cube",
            )
    return root


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """A page in a headless browser, and a picture of where it stood at the end."""
    if not CHROMIUM.exists():
        pytest.skip(f"no browser at {CHROMIUM}; scripts/browser.sh installs it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGUMENTS))
        page = browser.new_page(viewport={"width": 1280, "height": 1600})
        page.set_default_timeout(60_000)
        yield page
        page.screenshot(path=tmp_path / "end.png", full_page=True)
        browser.close()


def below(page: Page, description: str, kind: str) -> Locator:
    """The input that stands below a field's description in Prefect's form."""
    return page.locator(f"xpath=//div[normalize-space()='{description}']/following::{kind}[1]")


def deployment(platform: PlatformAddresses, flow: str) -> dict[str, Any]:
    """A deployment as the server has it."""
    # Not our own async client: playwright's synchronous one has an event loop running in this thread.
    answer = httpx.get(f"{platform.prefect_api_url}/deployments/name/{flow}/{flow}", trust_env=False, timeout=30)
    return dict(answer.raise_for_status().json())


def flow_run(platform: PlatformAddresses, flow_run_id: str) -> dict[str, Any]:
    """A flow run as the server has it."""
    answer = httpx.get(f"{platform.prefect_api_url}/flow_runs/{flow_run_id}", trust_env=False, timeout=30)
    return dict(answer.raise_for_status().json())


def deployment_url(platform: PlatformAddresses, flow: str) -> str:
    """Address of a deployment's page."""
    return f"{platform.prefect_api_url.removesuffix('/api')}/deployments/deployment/{deployment(platform, flow)['id']}"


def test_every_flow_has_a_deployment() -> None:
    """One deployment a flow, of its name and entrypoint, on our pool, without a path of any machine."""
    found = deployments()
    assert tuple(found) == FLOWS
    for name, deployment in found.items():
        assert deployment["entrypoint"] == f"flows/{name}.py:{name}"
        assert deployment["work_pool"] == {"name": "joynexus"}
        assert deployment["description"]
        assert "pull" not in deployment


@pytest.mark.parametrize("flow", ["sft", "rl"])
def test_a_form_needs_only_the_tenants_name(flow: str) -> None:
    """The rest of the workload is preset: that of the shipped workload, without its evaluation."""
    preset = presets.workload({"sft": "demos", "rl": "reach"}[flow])
    workload = deployments()[flow]["parameters"]["workload"]
    assert "tenant" not in workload
    filled = WorkloadSpec.model_validate({**workload, "tenant": {"name": preset.tenant.name}})
    assert filled == preset.model_copy(update={"evaluation": None})


def test_presets_of_the_other_forms_are_valid() -> None:
    """What the pages of evaluate, collect and pretrain offer can be started as it is."""
    found = deployments()
    assert EvaluateRequest.model_validate(found["evaluate"]["parameters"]["request"]).environment == "reach"
    assert CollectRequest.model_validate(found["collect"]["parameters"]["request"]).episodes == 150
    assert PretrainRequest.model_validate(found["pretrain"]["parameters"]["request"])


def test_evaluations_schedule_is_off_until_the_page_switches_it_on(platform: PlatformAddresses, page: Page) -> None:
    """The schedule is deployed, inactive, and the switch on the page changes it."""

    def active() -> list[bool]:
        return [schedule["active"] for schedule in deployment(platform, "evaluate")["schedules"]]

    assert active() == [False]
    page.goto(deployment_url(platform, "evaluate"))
    page.get_by_text("every-half-hour").wait_for()
    switch = page.get_by_role("switch")
    for wanted in (True, False):
        with page.expect_response(lambda r: r.request.method == "PATCH" and "/schedules/" in r.url):
            switch.click()
        assert active() == [wanted]


def test_sft_from_the_form_to_completed(
    platform: PlatformAddresses, home: Home, dataset: Path, page: Page, tmp_path: Path
) -> None:
    """Custom run: name the tenant, name a dataset, make it short, submit; the run appears and completes."""
    page.goto(deployment_url(platform, "sft"))
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    below(page, "The tenant; one policy slot a tenant.", "textarea").fill("page")
    named = "Name of a dataset of this installation, or absolute path of a LeRobot folder. None: see mixture."
    below(page, named, "textarea").fill(str(dataset))
    below(page, "Training jobs in all (the completion target).", "input").fill("2")
    below(page, "Microbatches of one job.", "input").fill("2")
    below(page, "Samples of one optimizer step.", "input").fill("8")
    page.screenshot(path=tmp_path / "form.png", full_page=True)

    run = page.get_by_role("link", name="sft page", exact=True)
    page.get_by_role("button", name="Submit").click()
    run.first.wait_for(timeout=120_000)
    page.screenshot(path=tmp_path / "started.png")
    run.first.click()
    ended = page.get_by_text("Completed", exact=True).or_(page.get_by_text("Failed", exact=True))
    ended.first.wait_for(timeout=180_000)
    page.screenshot(path=tmp_path / "ended.png")
    state = flow_run(platform, page.url.rpartition("/")[2])["state"]
    assert state["type"] == "COMPLETED", state["message"]
    assert home.tenant("page").is_dir()
