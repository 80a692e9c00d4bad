// Room 4: GRPO from the untrained weights, on the reader's machine.

import { asks, frame, numbers, oneOf, range, readFrame, remember, starts } from "./address.js";
import { text } from "./texts.js";
import { axisEnd, button, choice, curve, h, number, quiet, signed, slider } from "./dom.js";
import { POINTS, judged } from "./rewards.js";
import { BATCH, COUNT, openPool } from "./pool.js";
import { keep, kept } from "./store.js";
import { paid, verdict } from "./verdict.js";

const EVALUATE_EVERY = 25; // steps, as in the main script
const NOTHING = { format: 0, tag: 0, right: 0, whitespace: 0, close: 0, near: 0, wrong: 0, number: 0, token: 0 };
const PRESETS = {
  course: POINTS,
  form: { ...NOTHING, format: 3, tag: 0.5 },
  right: { ...NOTHING, right: 3, number: 1.5 },
  length: { ...NOTHING, token: 0.5 },
  short: { ...NOTHING, format: 3, token: -0.5 },
};
export const fields = {
  preset: oneOf("course", [...Object.keys(PRESETS), "mine"]), points: numbers(Object.values(POINTS), -10, 10, Object.keys(POINTS).length),
  beta: range(0.08, 0, 0.5), updates: range(1, 1, 8), clip: oneOf("0.2", ["0.1", "0.2", "0.4", "off"]),
  answers: range(8, 2, 16), rate: range(1e-3, 1e-4, 1e-2), steps: range(200, 50, 400), seed: range(0, 0, 9),
};
export const settings = starts(fields);
const pointsOf = ({ preset, points }) =>
  PRESETS[preset] ?? Object.fromEntries(Object.keys(POINTS).map((name, i) => [name, points[i]]));

// A training goes on while the reader is in another room. run: the settings it began with; last: the one before.
const empty = () => ({ step: 0, log: [], heldOut: [], shown: null, seconds: 0, run: null, saved: null });
export const training = { ...empty(), running: false, last: null, group: -1, fault: "", keeps: null };
let pool, loop = null, listener = () => {};

const asRun = () => Object.fromEntries(Object.keys(fields).map((name) => [name, settings[name]]));
const same = (a, b) => Object.keys(fields).every((name) => String(a[name]) === String(b[name]));

const asked = (asks(fields, readFrame()) || Boolean(frame.mission)) && frame.room === "train";

/** What a reload has left, adopted unless the address asks for other settings: then it is the run before. */
export const loaded = kept().then((found) => {
  if (!found) return;
  const { last, ...run } = found;
  training.last = last;
  if (!run.step) return;
  if (!asked || same(run.run, settings)) {
    Object.assign(training, run, { keeps: true });
    Object.assign(settings, run.run);
  } else training.last = asLast(run);
});
const asLast = ({ log, heldOut, run }) => ({ log, heldOut, run });

/** The workers, opened once; the weights of a training that a reload interrupted go into them. */
export function getPool() {
  pool ??= loaded.then(() => openPool(Math.max(8, settings.answers))).then(async (opened) => {
    if (training.saved) await opened.restore(training.saved);
    return opened;
  });
  return pool;
}
export const ownSteps = () => training.step;

async function save(workers) {
  const { step, log, heldOut, shown, seconds, run, last } = training;
  training.saved = step ? await workers.saved() : null;
  training.keeps = await keep({ step, log, heldOut, shown, seconds, run, last, saved: training.saved });
}

/** The untrained weights again; a step in progress is finished first, and the run stays as a ghost. */
async function restart() {
  training.running = false;
  await loop;
  if (training.log.length > 1) training.last = asLast(training);
  Object.assign(training, empty(), { fault: "" });
  if (pool) {
    const workers = await pool;
    await workers.reset();
    await save(workers);
  }
  listener();
}

/** Trains until the last step, or until the reader stops it; a loop that has not stopped yet goes on. */
function train() {
  training.running = true;
  training.run ??= asRun();
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
  const { steps, answers, beta, rate, seed, updates, clip } = training.run, points = pointsOf(training.run);
  if (workers.answers < answers) { // no room for groups of that size: other workers
    workers.end();
    pool = undefined;
    workers = await getPool();
  }
  while (training.running && training.step < steps) {
    if (!training.heldOut.length) await evaluate(workers);
    const began = performance.now(), epsilon = clip === "off" ? Infinity : Number(clip);
    const { questions, groups, kl, clipped } = await workers.step({
      answers, beta, epsilon, updates, rate, points, seed, step: training.step, steps,
    });
    training.seconds += (performance.now() - began) / 1000;
    training.step += 1;
    const flat = groups.flat();
    training.log.push({
      step: training.step, kl, clipped,
      reward: flat.reduce((sum, { points: parts }) => sum + Object.values(parts).reduce((a, b) => a + b, 0), 0) / flat.length,
      right: share(groups, ({ right }) => right), form: share(groups, ({ form }) => form),
      length: flat.reduce((sum, answer) => sum + answer.length, 0) / flat.length,
      silent: groups.filter((group) => group.every(({ advantage }) => advantage === 0)).length / groups.length,
    });
    training.shown = { questions, groups };
    if (training.step % EVALUATE_EVERY === 0 || training.step === steps) {
      await evaluate(workers);
      await save(workers);
    }
    listener();
  }
  if (training.step < steps) await save(workers); // stopped by the reader
}

async function evaluate(workers) {
  const { right, form } = await workers.evaluate("own", training.run.seed);
  training.heldOut.push({ step: training.step, right, form });
}

/** Called where the address has asked for settings: a training with others makes room, as the run before. */
export function settled() {
  if (training.run && !same(training.run, settings)) restart();
}

const mean = (rows, name) => rows.reduce((sum, row) => sum + row[name], 0) / rows.length;

/** What the verdict compares: the held-out questions before and now, the answers of the first and latest steps. */
export function compared({ log, heldOut }) {
  const of = (asked, rows) => ({
    right: asked.right, form: asked.form, length: mean(rows, "length"), reward: mean(rows, "reward"), kl: mean(rows, "kl"),
  });
  const now = heldOut.at(-1), until = log.slice(0, now.step);
  return [of(heldOut[0], until.slice(0, 3)), of(now, until.slice(-5))];
}

const percent = (x) => `${number(100 * x, 1)}\u00a0%`; // not torn apart at the end of a line
const scroll = (label, table) => h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table);
const SHOWN = { right: percent, form: percent, length: (x) => number(x, 1) };

/** The verdict's sentences, and a table of what pays and what has moved. */
function told(run) {
  const points = pointsOf(run.run), [before, after] = compared(run), pays = paid(points), away = run.run.beta;
  const line = ([key, { name, way, ...values }]) => {
    const shown = Object.fromEntries(Object.entries(values).map(([k, x]) => [k, name ? SHOWN[name](x) : number(x)]));
    return text(key, { ...shown, what: name && text(`what_${name}`), moved: way && text(way > 0 ? "rose" : "fell"), beta: number(away) });
  };
  const row = (name, show, pay) => h("tr", {}, h("td", {}, text(`what_${name}`)), h("td", {}, pay),
    h("td", { class: "number" }, show(before[name])), h("td", { class: "number" }, show(after[name])));
  return [
    h("p", { id: "verdict" }, verdict(points, before, after).map(line).join(text("between"))),
    scroll(text("what_measured"), h("table", { id: "verdict_table" },
      h("tr", {}, ["what_measured", "what_paid"].map((key) => h("th", {}, text(key))),
        h("th", { class: "number" }, text("what_before")), h("th", { class: "number" }, text("what_now", { step: run.heldOut.at(-1).step }))),
      ["right", "form", "length"].map((name) => row(name, SHOWN[name], text(`pay_${name}_${["less", "not", "more"][pays[name] + 1]}`))),
      row("reward", number, "–"), row("kl", (x) => number(x, 3), text(away ? "pay_kl" : "pay_kl_not", { beta: number(away) })))),
  ];
}

export function trainRoom(place) {
  const go = button("", () => (training.running ? (training.running = false, listener()) : train()), { class: "main", id: "train_go" });
  const bar = h("progress", { id: "progress", max: settings.steps, value: 0, "aria-label": text("train_progress") });
  const status = h("p", { id: "train_told", "aria-live": "off" }), figures = h("div", { class: "figures", id: "figures" });
  const curves = h("div", { class: "curves" }), learned = h("div", { class: "notice", id: "learned" }), before = quiet("ghost_none");
  const changed = h("p", { class: "quiet", id: "train_changed" });
  // Buttons that stay: one that is replaced with every step could not be clicked, and would lose the focus.
  const numbers = Array.from({ length: BATCH }, (_, i) => button(String(i + 1), () => { training.group = i; show(); },
    { id: `group_${i + 1}`, "aria-label": text("group_number", { i: i + 1 }) }));
  const heading = h("h3"), rows = h("div");
  const group = h("div", { id: "train_group" }, heading, h("div", { class: "controls" }, numbers), rows);
  let wasStarted, verdictAt;

  function show() {
    const { step, running, log, heldOut, shown, seconds, fault, last: ghost } = training;
    const { steps } = training.run ?? settings, started = step > 0 || running;
    go.textContent = text(running ? "pause" : step === 0 ? "train_start" : step < steps ? "train_on" : "train_done");
    go.disabled = !running && step >= steps;
    bar.max = steps;
    bar.value = step;
    const each = step ? seconds / step : 0;
    status.textContent = fault ? text("train_fault", { fault })
      : running && !step ? text("train_first")
      : !step ? text("train_ready")
      : text(running ? "train_told" : "train_stopped", { step, steps, each: number(each, 2), left: Math.ceil(each * (steps - step)) })
        + (running || training.keeps === null ? "" : ` ${text(training.keeps ? "train_kept" : "train_not_kept")}`);
    status.className = fault ? "bad" : "";
    for (const element of place.querySelectorAll(".fixed input, .fixed select")) element.disabled = started;
    if (wasStarted !== started) place.querySelector("#settings").open = !(wasStarted = started); // opens and closes by itself, once
    const first = heldOut[0], last = heldOut.at(-1);
    figures.replaceChildren(...[["train_right", "right"], ["train_form", "form"]].map(([name, key]) =>
      h("span", { "data-figure": key }, text(name), " ", first ? percent(first[key]) : "–", " → ", h("b", {}, heldOut.length > 1 ? percent(last[key]) : "–"))));
    const points = (key, from = log) => from.filter((row) => row[key] !== null).map((row) => [row.step, row[key]]);
    const dots = (key, from = heldOut) => from.map((row) => [row.step, row[key]]);
    const end = Math.max(steps, ghost?.run.steps ?? 0), both = (key) => [...points(key), ...points(key, ghost?.log ?? [])].map(([, x]) => x);
    const drawn = (key, name, options) => curve(text(name), points(key), { steps: end, ...options,
      dots: options.dotted ? dots(key) : [], ghost: ghost ? { points: points(key, ghost.log), dots: options.dotted ? dots(key, ghost.heldOut) : [] } : {} });
    curves.replaceChildren(
      drawn("right", "curve_right", { max: 1, show: percent, dotted: true }),
      drawn("form", "curve_form", { max: 1, show: percent, dotted: true }),
      drawn("reward", "curve_reward", { max: Math.max(1, ...both("reward")), min: Math.min(0, ...both("reward")) }),
      drawn("kl", "curve_kl", { max: Math.max(axisEnd(points("kl").map(([, x]) => x), 0.3), axisEnd((ghost?.log ?? []).map((row) => row.kl), 0.3)), show: (x) => number(x, 3) }),
      drawn("length", "curve_length", { max: 28, show: (x) => number(x, 1) }),
      (training.run ?? settings).updates > 1 ? drawn("clipped", "curve_clipped", { max: 1, show: percent })
        : drawn("silent", "curve_silent", { max: 1, show: percent }));
    const now = training.run ?? settings, valueOf = (name, run) =>
      (name === "preset" ? text(`preset_${run.preset}`) : run[name] === "off" ? text("clip_off") : String(run[name]));
    const differing = (other) => Object.keys(fields).filter((name) => String(other[name]) !== String(now[name]) && (name !== "points" || now.preset === "mine"));
    const unlike = differing(starts(fields)); // a mission may have set it, while the settings are folded away
    changed.hidden = !unlike.length;
    changed.textContent = text("train_changed", { what: unlike.map((name) => `${text(`setting_${name}`)} ${valueOf(name, now)}`).join(", ") });
    before.hidden = !ghost;
    if (ghost) {
      const differs = differing(ghost.run);
      before.textContent = text("ghost", { what: differs.map((name) => `${text(`setting_${name}`)} ${valueOf(name, ghost.run)} (${text("ghost_now", { value: valueOf(name, now) })})`).join(", ") || text("ghost_same") });
    }
    learned.hidden = heldOut.length < 2;
    if (heldOut.length < 2) verdictAt = undefined;
    else if (verdictAt !== last.step) { // else its place in the page would be read out again with every step
      verdictAt = last.step;
      learned.replaceChildren(...told(training));
    }
    group.hidden = !shown;
    if (!shown) return;
    const { questions, groups } = shown, silent = groups.map((list) => list.every(({ advantage }) => advantage === 0));
    const at = training.group < 0 ? Math.max(0, silent.indexOf(false)) : training.group; // one that teaches something
    heading.textContent = text("train_groups", { step });
    numbers.forEach((element, i) => {
      element.className = silent[i] ? "silent" : "";
      element.setAttribute("aria-pressed", String(i === at));
    });
    rows.replaceChildren(
      h("p", {}, h("strong", {}, questions[at].text), " ", text("gold"), " ", questions[at].gold),
      scroll(heading.textContent, h("table", {},
        h("tr", {}, h("th", {}, text("answer")), h("th", {}, text("judged")), h("th", { class: "number" }, text("points")), h("th", { class: "number" }, "A")),
        groups[at].map((answer) => h("tr", {}, h("td", {}, answer.text),
          h("td", { class: answer.right ? "good" : "quiet" }, text(`judged_${judged(answer.text, questions[at].gold)}`)),
          h("td", { class: "number" }, number(Object.values(answer.points).reduce((a, b) => a + b, 0), 2)),
          h("td", { class: `number ${answer.advantage > 0 ? "good" : answer.advantage < 0 ? "bad" : ""}` }, signed(answer.advantage)))))));
  }

  const turned = (name) => (x) => {
    settings[name] = x;
    remember();
    show();
  };
  const points = h("div", { class: "points" });
  function fill() {
    const set = pointsOf(settings);
    points.replaceChildren(...Object.keys(POINTS).map((name, i) => h("label", {}, text(`points_${name}`), h("input", {
      type: "number", step: 0.25, min: -10, max: 10, id: `points_${name}`, value: set[name],
      oninput: ({ target }) => {
        const list = Object.values(pointsOf(settings));
        list[i] = Number.isFinite(target.valueAsNumber) ? Math.max(-10, Math.min(10, target.valueAsNumber)) : 0;
        settings.points = list;
        preset.querySelector("select").value = settings.preset = "mine";
        remember();
      },
    }))));
  }
  const preset = choice("preset", text("train_reward"), Object.keys({ ...PRESETS, mine: 0 }).map((name) => [name, text(`preset_${name}`)]),
    settings.preset, (name) => {
      if (name === "mine") settings.points = Object.values(pointsOf(settings));
      turned("preset")(name);
      fill();
    });
  fill();
  place.append(
    h("h2", {}, text("train_title")), h("p", {}, text("train_about", { batch: BATCH })),
    h("div", { class: "controls" }, go, button(text("reset"), restart, { id: "train_reset" })),
    bar, status, changed, figures,
    h("details", { class: "fixed", id: "settings" }, h("summary", {}, text("train_settings")), h("div", { class: "controls" }, preset,
      choice("clip", text("setting_clip"), fields.clip.values.map((value) => [value, value === "off" ? text("clip_off") : value]), settings.clip, turned("clip"))),
      h("div", { class: "sliders" },
        slider("beta", text("beta"), { min: 0, max: 0.5, step: 0.01, value: settings.beta, show: (x) => number(x), change: turned("beta") }),
        slider("updates", text("updates"), { min: 1, max: 8, step: 1, value: settings.updates, change: turned("updates") }),
        slider("answers", text("G"), { min: 2, max: 16, step: 1, value: settings.answers, change: turned("answers") }),
        slider("rate", text("rate"), { min: -4, max: -2, step: 0.1, value: Math.log10(settings.rate), show: (x) => (10 ** x).toExponential(1), change: (x) => turned("rate")(Number((10 ** x).toPrecision(2))) }),
        slider("steps", text("steps"), { min: 50, max: 400, step: 50, value: settings.steps, change: turned("steps") }),
        slider("seed", text("seed"), { min: 0, max: 9, step: 1, value: settings.seed, change: turned("seed") })),
      h("details", {}, h("summary", {}, text("train_points")), points)),
    learned, curves, before, quiet("curve_about"), group, quiet("train_needs", { count: COUNT }));
  listener = () => { if (bar.isConnected) show(); };
  show();
}
