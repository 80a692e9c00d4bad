// Room 4: GRPO from the untrained weights, on the reader's machine.

import { text } from "./texts.js";
import { button, choice, curve, h, number, quiet, signed, slider } from "./dom.js";
import { POINTS } from "./rewards.js";
import { BATCH, COUNT, openPool } from "./pool.js";

const EVALUATE_EVERY = 25; // steps, as in the main script
export const settings = { steps: 200, beta: 0.08, answers: 8, rate: 1e-3, seed: 0, preset: "course", points: { ...POINTS } };
const NOTHING = { format: 0, tag: 0, right: 0, whitespace: 0, close: 0, near: 0, wrong: 0, number: 0, token: 0 };
const PRESETS = {
  course: POINTS,
  form: { ...NOTHING, format: 3, tag: 0.5 },
  right: { ...NOTHING, right: 3, number: 1.5 },
  length: { ...NOTHING, token: 0.5 },
  short: { ...NOTHING, format: 3, token: -0.5 },
};
// What a training has come to; it goes on while the reader is in another room.
export const training = { step: 0, running: false, log: [], heldOut: [], group: -1, kept: null, seconds: 0, fault: "" };
let pool, loop = null, listener = () => {};

/** The workers, opened once. */
export function getPool() {
  pool ??= openPool(settings.answers);
  return pool;
}
export const ownSteps = () => training.step;

/** The untrained weights again; a step in progress is finished first. */
async function restart() {
  training.running = false;
  await loop;
  Object.assign(training, { step: 0, log: [], heldOut: [], kept: null, seconds: 0, fault: "" });
  await (await getPool()).reset();
  listener();
}

/** Trains until the last step, or until the reader stops it; a loop that has not stopped yet goes on. */
function train() {
  training.running = true;
  loop ??= steps().catch((error) => {
    training.fault = String(error.message || error);
  }).finally(() => {
    training.running = false;
    loop = null;
    listener();
  });
  listener();
}

const share = (groups, what) => groups.flat().filter(what).length / groups.flat().length;

async function steps() {
  let workers = await getPool();
  const { steps, answers, beta, rate, points, seed } = settings;
  if (workers.answers < answers) { // no room for groups of that size: other workers
    workers.end();
    pool = undefined;
    workers = await getPool();
  }
  while (training.running && training.step < steps) {
    if (!training.heldOut.length) await evaluate(workers);
    const began = performance.now();
    const { questions, groups, kl } = await workers.step({ answers, beta, rate, points, seed, step: training.step, steps });
    training.seconds += (performance.now() - began) / 1000;
    training.step += 1;
    const flat = groups.flat();
    training.log.push({
      step: training.step, kl,
      reward: flat.reduce((sum, { points: parts }) => sum + Object.values(parts).reduce((a, b) => a + b, 0), 0) / flat.length,
      right: share(groups, ({ right }) => right), form: share(groups, ({ form }) => form),
      length: flat.reduce((sum, answer) => sum + answer.length, 0) / flat.length,
      silent: groups.filter((group) => group.every(({ advantage }) => advantage === 0)).length / groups.length,
    });
    training.kept = { questions, groups };
    if (training.step % EVALUATE_EVERY === 0 || training.step === steps) await evaluate(workers);
    listener();
  }
}

async function evaluate(workers) {
  const { right, form } = await workers.evaluate("own", settings.seed);
  training.heldOut.push({ step: training.step, right, form });
}

export function trainRoom(place) {
  const go = button("", () => (training.running ? (training.running = false, listener()) : train()), { class: "main", id: "train" });
  const bar = h("progress", { id: "progress", max: settings.steps, value: 0, "aria-label": text("train_progress") });
  const told = h("p", { id: "train_told", "aria-live": "off" }), figures = h("div", { class: "figures", id: "figures" });
  const curves = h("div", { class: "curves" }), learned = h("p", { class: "notice", id: "learned" });
  // Buttons that stay: one that is replaced with every step could not be clicked, and would lose the focus.
  const numbers = Array.from({ length: BATCH }, (_, i) => button(String(i + 1), () => { training.group = i; show(); },
    { "aria-label": text("group_number", { i: i + 1 }) }));
  const heading = h("h3"), rows = h("div");
  const group = h("div", { id: "train_group" }, heading, h("div", { class: "controls" }, numbers), rows);
  let wasStarted;
  const percent = (x) => `${number(100 * x, 1)} %`;

  function show() {
    const { step, running, log, heldOut, kept, seconds, fault } = training, { steps } = settings;
    const started = step > 0 || running;
    go.textContent = text(running ? "pause" : step === 0 ? "train_start" : step < steps ? "train_on" : "train_done");
    go.disabled = !running && step >= steps;
    bar.max = steps;
    bar.value = step;
    const each = step ? seconds / step : 0;
    told.textContent = fault ? text("train_fault", { fault }) : text(running && !step ? "train_first" : "train_told", {
      step, steps, each: number(each, 2), left: step ? Math.ceil(each * (steps - step)) : "–",
    });
    told.className = fault ? "bad" : "";
    for (const element of place.querySelectorAll(".fixed input, .fixed select")) element.disabled = started;
    if (wasStarted !== started) place.querySelector("#settings").open = !(wasStarted = started); // opens and closes by itself, once
    const first = heldOut[0], last = heldOut.at(-1);
    figures.replaceChildren(...[["train_right", "right"], ["train_form", "form"]].map(([name, key]) =>
      h("span", { "data-figure": key }, text(name), " ", first ? percent(first[key]) : "–", " → ", h("b", {}, last ? percent(last[key]) : "–"))));
    const points = (key) => log.map((row) => [row.step, row[key]]);
    const maximum = (key, least) => Math.max(least, ...log.map((row) => row[key]));
    const lowest = Math.min(0, ...log.map((row) => row.reward));
    curves.replaceChildren(
      curve(text("curve_right"), points("right"), { steps, max: 1, show: percent, dots: heldOut.map((row) => [row.step, row.right]) }),
      curve(text("curve_reward"), points("reward"), { steps, max: maximum("reward", 1), min: lowest }),
      curve(text("curve_form"), points("form"), { steps, max: 1, show: percent, dots: heldOut.map((row) => [row.step, row.form]) }),
      curve("KL (nat)", points("kl"), { steps, max: maximum("kl", 0.3), show: (x) => number(x, 3) }),
      curve(text("curve_length"), points("length"), { steps, max: 28, show: (x) => number(x, 1) }),
      curve(text("curve_silent"), points("silent"), { steps, max: 1, show: percent }));
    const recent = log.slice(-10), mean = (key) => recent.reduce((sum, row) => sum + row[key], 0) / recent.length;
    learned.hidden = step < 20;
    if (step >= 20) {
      learned.textContent = text(mean("right") > 0.7 ? "learned_right" : mean("length") > 24 ? "learned_long"
        : mean("form") < 0.8 ? "learned_little" : mean("right") < 0.2 ? "learned_short" : "learned_form");
    }
    group.hidden = !kept;
    if (!kept) return;
    const { questions, groups } = kept, silent = groups.map((rows) => rows.every(({ advantage }) => advantage === 0));
    const at = training.group < 0 ? Math.max(0, silent.indexOf(false)) : training.group; // one that teaches something
    heading.textContent = text("train_groups", { step });
    numbers.forEach((element, i) => {
      element.className = silent[i] ? "silent" : "";
      element.setAttribute("aria-pressed", String(i === at));
    });
    rows.replaceChildren(
      h("p", {}, h("strong", {}, questions[at].text), " ", text("gold"), " ", questions[at].gold),
      h("div", { class: "scroll" }, h("table", {},
        h("tr", {}, h("th", {}, text("answer")), h("th", { class: "number" }, text("points")), h("th", { class: "number" }, "A")),
        groups[at].map((answer) => h("tr", {}, h("td", { class: answer.right ? "good" : "" }, answer.text),
          h("td", { class: "number" }, number(Object.values(answer.points).reduce((a, b) => a + b, 0), 2)),
          h("td", { class: `number ${answer.advantage > 0 ? "good" : answer.advantage < 0 ? "bad" : ""}` }, signed(answer.advantage)))))));
  }

  const points = h("div", { class: "points" });
  function fields() {
    points.replaceChildren(...Object.keys(POINTS).map((name) => h("label", {}, text(`points_${name}`), h("input", {
      type: "number", step: 0.25, min: -10, max: 10, id: `points_${name}`, value: settings.points[name],
      oninput: ({ target }) => {
        settings.points[name] = Number.isFinite(target.valueAsNumber) ? Math.max(-10, Math.min(10, target.valueAsNumber)) : 0;
        preset.querySelector("select").value = settings.preset = "mine";
      },
    }))));
  }
  const preset = choice("preset", text("train_reward"), [...Object.keys(PRESETS), "mine"].map((name) => [name, text(`preset_${name}`)]),
    settings.preset, (name) => { settings.preset = name; if (PRESETS[name]) { settings.points = { ...PRESETS[name] }; fields(); } });
  fields();
  place.append(
    h("h2", {}, text("train_title")), h("p", {}, text("train_about", { batch: BATCH })),
    h("div", { class: "controls" }, go, button(text("reset"), restart, { id: "train_reset" })),
    bar, told, figures,
    h("details", { class: "fixed", id: "settings" }, h("summary", {}, text("train_settings")), h("div", { class: "controls" }, preset),
      h("div", { class: "sliders" },
        slider("beta", text("beta"), { min: 0, max: 0.5, step: 0.01, value: settings.beta, show: (x) => number(x), change: (x) => { settings.beta = x; } }),
        slider("answers", text("G"), { min: 2, max: 16, step: 1, value: settings.answers, change: (x) => { settings.answers = x; } }),
        slider("rate", text("rate"), { min: -4, max: -2, step: 0.1, value: Math.log10(settings.rate), show: (x) => (10 ** x).toExponential(1), change: (x) => { settings.rate = 10 ** x; } }),
        slider("steps", text("steps"), { min: 50, max: 400, step: 50, value: settings.steps, change: (x) => { settings.steps = x; bar.max = x; } }),
        slider("seed", text("seed"), { min: 0, max: 9, step: 1, value: settings.seed, change: (x) => { settings.seed = x; } })),
      h("details", {}, h("summary", {}, text("train_points")), points)),
    learned, curves, quiet("curve_about"), group, quiet("train_needs", { count: COUNT }));
  listener = () => { if (bar.isConnected) show(); };
  show();
}
