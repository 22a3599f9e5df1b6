// Where adapters are, kept up to date on lists while they are looked at.

const RENEW_MS = 5_000;
const MOST = 50;
const chips = [...document.querySelectorAll("[data-tier]")];
const shown = { disk: ["disk", "Disk"], fetching: ["host", "Reading"], host: ["host", "Host"], loading: ["hbm", "Loading"], hbm: ["hbm", "HBM"] };

function draw(chip, { tier, pinned, error }) {
  const [kind, text] = error ? ["bad", "Cannot be loaded"] : (shown[tier] ?? shown.disk);
  const label = chip.querySelector(".chip");
  if (label.textContent !== text) Object.assign(label, { className: `chip chip-${kind}`, textContent: text, title: error });
  chip.querySelector(".pinned").hidden = !pinned;
}

async function renew() {
  if (document.hidden) return;
  const path = location.pathname.match(/^\/console\/t\/[^/]+/)?.[0] ?? "/console";
  const digests = [...new Set(chips.map((chip) => chip.dataset.tier))].slice(0, MOST);
  const response = await fetch(`${path}/tiers?digests=${digests.join(",")}`);
  if (!response.ok) return;
  const now = await response.json();
  for (const chip of chips) draw(chip, now[chip.dataset.tier] ?? { tier: "disk", pinned: false, error: "" });
}

if (chips.length) setInterval(() => renew().catch(() => {}), RENEW_MS);
