"""What a user sees of a run in a real `mlflow ui`, through a real browser, on the way that the README describes."""

import os
import shutil

import pytest
from selenium import webdriver
from selenium.common import WebDriverException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from conftest import Server

OPTIONS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1600,1200")


@pytest.fixture
def browser():
    """Headless Chromium with Debian's own driver, so that nothing is downloaded."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no browser to look at the UI with: apt-get install chromium chromium-driver (Debian)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in OPTIONS:
        options.add_argument(option)
    browser = webdriver.Chrome(options, Service(driver))
    yield browser
    browser.quit()


@pytest.fixture
def address(small_run, tmp_path):
    """That of a `mlflow ui` on the store of the recorded run."""
    server = Server(tmp_path, verb="ui", store=small_run.store)
    yield server.address
    server.kill()


def test_a_user_finds_params_curves_and_artifacts(browser, address, tmp_path):
    def until(look, what):
        """What `look` returns, once that is something; the page may draw itself anew in between."""
        wait = WebDriverWait(browser, 20, poll_frequency=0.2, ignored_exceptions=[WebDriverException])
        return wait.until(lambda _: look(), f"not on the screen: {what}")

    def shown(xpath):
        return until(lambda: [e for e in browser.find_elements(By.XPATH, xpath) if e.is_displayed()], xpath)[0]

    def points(chart):
        return chart.find_elements(By.CSS_SELECTOR, "svg .points .point")

    def click(text):
        xpath = f"//*[normalize-space(text())='{text}']"
        until(lambda: shown(xpath).click() or True, text)

    browser.get(address)
    click("Model training")
    click("p7-grpo")
    click("grpo-first-add")
    shown("//h2[normalize-space(.)='grpo-first-add']")
    shown("//button[@aria-label='Close']").click()  # the assistant, which takes a quarter of the screen

    for name, value in (("num_generations", "8"), ("lora_r", "16")):
        shown("//input[@placeholder='Search parameters']").send_keys(Keys.CONTROL, "a", Keys.NULL, name)  # NULL lets Ctrl go
        row = f"//*[@role='row'][*[@role='cell'][normalize-space(.)='{name}']]"
        until(lambda: shown(row).text.split() == [name, value], f"{name} {value}")  # noqa: B023

    click("Model metrics")
    shown("//input[@placeholder='Search metric charts']").send_keys("rewards/")
    legend = "//*[text()='grpo-first-add (rewards/correctness_reward/mean)']"
    chart = f"{legend}/ancestor::*[.//*[contains(@class, 'js-plotly-plot')]][1]"
    until(lambda: [point.is_displayed() for point in points(shown(chart))] == [True, True], "a curve of two points")
    browser.save_screenshot(os.environ.get("SCREENSHOT", str(tmp_path / "curves.png")))

    click("Artifacts")
    click("reward_curve.png")
    image = "//img[@alt='reward_curve.png']"
    until(lambda: shown(image).get_property("naturalWidth") == 880, "reward_curve.png as an image")
    click("lora")
    shown("//*[normalize-space(.)='adapter_model.safetensors']")
