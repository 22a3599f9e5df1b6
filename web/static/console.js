// What every page has: theme, menus, dialogs, questions before a change, copying, times.
import { copyText } from "./copy.js";

const root = document.documentElement;
const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

const actions = {
  "[data-theme-toggle]": () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("theme", root.dataset.theme);
    document.dispatchEvent(new CustomEvent("themechange"));
  },
  "[data-dialog]": (button) => document.getElementById(button.dataset.dialog).showModal(),
  "dialog [data-close]": (button) => button.closest("dialog").close(),
  "[data-copy]": async (button) => {
    await copyText(button.dataset.copy);
    const label = button.querySelector("[data-label]") ?? button;
    const before = label.textContent;
    label.textContent = "Copied";
    setTimeout(() => (label.textContent = before), 1600);
  },
};

document.addEventListener("click", (event) => {
  for (const [selector, act] of Object.entries(actions)) {
    const found = event.target.closest(selector);
    if (found) act(found);
  }
  if (event.target.matches("dialog")) event.target.close(); // the backdrop
  for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
});

// A menu's items are fixed to the window, so that the table around them cannot cut them off.
function place(menu) {
  const items = menu.querySelector(".menu-items"), button = menu.querySelector("summary").getBoundingClientRect();
  const below = button.bottom + items.offsetHeight + 8 < innerHeight;
  items.style.top = `${below ? button.bottom : Math.max(8, button.top - items.offsetHeight - 8)}px`;
  items.style.left = `${Math.max(8, button.right - items.offsetWidth)}px`;
}
document.addEventListener("toggle", (event) => event.target.matches("details.menu[open]") && place(event.target), true);
document.addEventListener("scroll", () => document.querySelectorAll("details.menu[open]").forEach((menu) => (menu.open = false)), true);

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  const menu = document.activeElement?.closest("details.menu[open]");
  if (menu) {
    menu.open = false;
    menu.querySelector("summary").focus();
  }
});

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.dataset.confirm && !confirm(form.dataset.confirm)) return event.preventDefault();
  if (event.defaultPrevented || form.method !== "post") return;
  setTimeout(() => form.querySelectorAll("button:not([type=button])").forEach((button) => (button.disabled = true)));
});
addEventListener("pageshow", (event) => {
  if (event.persisted) document.querySelectorAll("form button[disabled]").forEach((button) => (button.disabled = false));
});

const menu = document.getElementById("rail-menu");
const narrow = matchMedia("(max-width: 760px)");
const fitMenu = () => menu && (menu.open = !narrow.matches);
narrow.addEventListener("change", fitMenu);
fitMenu();

const UNITS = [["year", 31536e3], ["month", 2592e3], ["day", 86400], ["hour", 3600], ["minute", 60]];
const relative = new Intl.RelativeTimeFormat("en", { numeric: "auto" });
function ago(seconds) {
  const [unit, size] = UNITS.find(([, size]) => Math.abs(seconds) >= size) ?? [];
  return unit ? relative.format(Math.round(seconds / size), unit) : "just now";
}
/** Times below `scope` in words, such as "3 hours ago". */
export function tellTimes(scope = document) {
  for (const time of scope.querySelectorAll("time[data-relative]")) time.textContent = ago((new Date(time.dateTime) - Date.now()) / 1000);
}
tellTimes();
setInterval(tellTimes, 30_000);

for (const dialog of document.querySelectorAll("dialog[data-open]")) dialog.showModal();
document.querySelector("[aria-invalid=true]")?.focus();
