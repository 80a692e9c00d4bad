// Room 5: GRPO from the untrained weights, on the reader's machine.

import { addressOf, asks, frame, numbers, oneOf, range, readFrame, remember, starts, whole } from "./address.js";
import { text } from "./texts.js";
import { axisEnd, button, choice, curve, h, number, quiet, signed, slider } from "./dom.js";
import { END } from "./model.js";
import { POINTS, judged, total } from "./rewards.js";
import { BATCH, COUNT, VOCABULARY_WORDS, openPool } from "./pool.js";
import { keep, kept } from "./store.js";
import { paid, verdict } from "./verdict.js";

const EVALUATE_EVERY = 25; // steps, as in the main script
const KEEP_EVERY = 5; // steps
const NOTHING = { format: 0, tag: 0, right: 0, whitespace: 0, close: 0, near: 0, wrong: 0, number: 0, token: 0 };
const PRESETS = {
  course: POINTS,
  form: { ...NOTHING, format: 3, tag: 0.5 },
  right: { ...NOTHING, right: 3, number: 1.5 },
  length: { ...NOTHING, token: 0.5 },
  short: { ...NOTHING, format: 3, token: -0.5 },
};
export const fields = {
  preset: oneOf("course", [...Object.keys(PRESETS), "mine"]),
  points: numbers(Object.values(POINTS), -10, 10, Object.keys(POINTS).length),
  beta: range(0.08, 0, 0.5), temperature: range(1, 0.5, 1.5),
  updates: whole(1, 1, 8), clip: oneOf("0.2", ["0.1", "0.2", "0.4", "off"]),
  answers: whole(8, 2, 16), rate: range(1e-3, 1e-4, 1e-2), steps: whole(200, 50, 400),
  seed: whole(0, 0, 9),
};
export const settings = starts(fields);
const pointsOf = ({ preset, points }) =>
  PRESETS[preset] ?? Object.fromEntries(Object.keys(POINTS).map((name, i) => [name, points[i]]));

// A training goes on while the reader is in another room. run: its settings; turns: [{ step, name }] of
// those changed on the way; last: the training before; waiting: steps of one that is kept in this browser,
// while the address asks for other settings.
const empty = () => ({
  step: 0, log: [], heldOut: [], shown: null, seconds: 0, run: null, turns: [], saved: null,
});
export const training = {
  ...empty(), running: false, last: null, group: -1, fault: "", keeps: null, waiting: 0,
};
let pool, loop = null, listener = () => {};

const asRun = () => Object.fromEntries(Object.keys(fields).map((name) => [name, settings[name]]));
const same = (a, b) => Object.keys(fields).every((name) => String(a[name]) === String(b[name]));
const asLast = ({ log, heldOut, run }) => ({ log, heldOut, run });

const asked = (asks(fields, readFrame()) || Boolean(frame.mission)) && frame.room === "train";

/** What a reload has left, adopted unless the address asks for other settings: then it waits. */
export const loaded = kept().then((found) => {
  if (!found) return;
  const { last, ...run } = found;
  training.last = last;
  if (!run.step) return;
  if (!asked || same(run.run, settings)) {
    Object.assign(training, run, { keeps: true });
    Object.assign(settings, run.run);
  } else Object.assign(training, { last: asLast(run), waiting: run.step });
});

/** Whether trained weights may go: there are none, or the reader says so. */
function mayDiscard() {
  const steps = training.step || training.waiting;
  return !steps || confirm(text("train_discard", { steps }));
}

/** The workers, opened once; the weights of a training that a reload interrupted go into them. */
export function getPool() {
  pool ??= loaded.then(() => openPool(Math.max(8, settings.answers))).then(async (opened) => {
    if (training.saved) await opened.restore(training.saved);
    return opened;
  });
  return pool;
}
export const ownSteps = () => training.step;

/** `workers` aren't needed where nothing is trained. */
async function save(workers) {
  const { step, log, heldOut, shown, seconds, run, turns, last } = training;
  const saved = training.saved = step ? await workers.saved() : null;
  training.keeps = await keep({ step, log, heldOut, shown, seconds, run, turns, last, saved });
}

/** The untrained weights again; a step in progress is finished first, and the run stays as a ghost. */
async function restart() {
  training.running = false;
  await loop;
  if (training.log.length > 1) training.last = asLast(training);
  Object.assign(training, empty(), { fault: "", waiting: 0 });
  if (pool) await (await pool).reset();
  await save();
  listener();
}

/** Trains until the last step, or until the reader stops it; a loop that has not stopped yet goes on. */
function train() {
  if (!training.step && !mayDiscard()) return;
  Object.assign(training, { running: true, waiting: 0 });
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
  const { steps, answers, rate, seed, updates, clip } = training.run;
  if (workers.answers < answers) { // no room for groups of that size: other workers
    workers.end();
    pool = undefined;
    workers = await getPool();
  }
  while (training.running && training.step < steps) {
    if (!training.heldOut.length) await evaluate(workers);
    const began = performance.now(), epsilon = clip === "off" ? Infinity : Number(clip);
    const { beta, temperature } = training.run; // these may change on the way
    const { questions, groups, kl, clipped, moved } = await workers.step({
      answers, beta, epsilon, updates, rate, points: pointsOf(training.run), temperature, seed,
      step: training.step, steps,
    });
    training.seconds += (performance.now() - began) / 1000;
    training.step += 1;
    const flat = groups.flat();
    training.log.push({
      step: training.step, kl, clipped, moved,
      reward: flat.reduce((sum, { points: parts }) => sum + total(parts), 0) / flat.length,
      right: share(groups, ({ right }) => right), form: share(groups, ({ form }) => form),
      length: flat.reduce((sum, answer) => sum + answer.length, 0) / flat.length,
      silent: groups.filter((group) => group.every(({ advantage }) => advantage === 0)).length / groups.length,
    });
    training.shown = { questions, groups };
    if (training.step % EVALUATE_EVERY === 0 || training.step === steps) {
      await evaluate(workers);
    }
    if (training.step % KEEP_EVERY === 0 || training.step === steps) await save(workers);
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
  if (!training.run || same(training.run, settings)) return;
  if (mayDiscard()) restart();
  else {
    Object.assign(settings, training.run);
    frame.mission = null;
  }
}

/** A setting is turned; one that may change on the way is noted with its step. */
function change(name, value) {
  settings[name] = value;
  const { run, running, turns } = training, step = training.step + Number(running), last = turns.at(-1);
  if (run && training.step < run.steps) { // the step that is being made has the old value
    training.run = asRun();
    if (last?.step !== step || last.name !== name) turns.push({ step, name });
  }
  remember();
}

const mean = (rows, name) => rows.reduce((sum, row) => sum + row[name], 0) / rows.length;

/** The step after which what pays hasn't changed. */
const sinceOf = ({ turns }) =>
  turns.findLast(({ name }) => name === "preset" || name === "points")?.step ?? 0;

/**
 * What the verdict compares: the held-out questions before and now, the answers of the first and latest
 * steps; since the points were last changed. null: no questions were asked since.
 */
export function compared(run) {
  const { log, heldOut } = run, since = sinceOf(run), now = heldOut.at(-1);
  if (!now || now.step <= since) return null;
  const of = ({ step, right, form }, rows) => ({
    step, right, form, length: mean(rows, "length"), reward: mean(rows, "reward"), kl: mean(rows, "kl"),
  });
  const rows = log.slice(since, now.step), first = heldOut.findLast(({ step }) => step <= since);
  return [of(first, rows.slice(0, 3)), of(now, rows.slice(-5))];
}

const percent = (x) => `${number(100 * x, 1)}\u00a0%`; // not torn apart at the end of a line
const scroll = (label, table) =>
  h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table);
const SHOWN = { right: percent, form: percent, length: (x) => number(x, 1) };
const SILENT = 10; // steps that the note on silent groups looks back over

/** The verdict's sentences, and a table of what pays and what has moved. */
function told(run) {
  const points = pointsOf(run.run), [before, after] = compared(run), pays = paid(points), away = run.run.beta;
  const line = ([key, { name, way, ...values }]) => {
    const shown = Object.entries(values).map(([k, x]) => [k, name ? SHOWN[name](x) : number(x)]);
    return text(key, {
      ...Object.fromEntries(shown), what: name && text(`what_${name}`),
      moved: way && text(way > 0 ? "rose" : "fell"), beta: number(away),
    });
  };
  const row = (name, show, pay) => h("tr", {}, h("td", {}, text(`what_${name}`)), h("td", {}, pay),
    h("td", { class: "number" }, show(before[name])), h("td", { class: "number" }, show(after[name])));
  const paying = (name) => text(`pay_${name}_${["less", "not", "more"][pays[name] + 1]}`);
  const at = ({ step }) => h("th", { class: "number" }, text(step ? "what_now" : "what_before", { step }));
  const since = sinceOf(run), said = verdict(points, before, after).map(line);
  if (since) said.unshift(text("verdict_since", { step: since }));
  return [
    h("p", { id: "verdict" }, said.join(text("between"))),
    scroll(text("what_measured"), h("table", { id: "verdict_table" },
      h("tr", {}, ["what_measured", "what_paid"].map((key) => h("th", {}, text(key))), at(before), at(after)),
      ["right", "form", "length"].map((name) => row(name, SHOWN[name], paying(name))),
      row("reward", number, "–"),
      row("kl", (x) => number(x, 3), text(away ? "pay_kl" : "pay_kl_not", { beta: number(away) })))),
  ];
}

/** Why the weights move though nearly all groups are silent. With BETA, the KL moves them: empty. */
export function silentTold({ log, run }) {
  const late = log.slice(-SILENT), early = log.slice(0, SILENT);
  if (run?.beta !== 0 || log.length < 2 * SILENT || mean(late, "silent") < 0.8) return "";
  return text("train_silent", {
    steps: SILENT, silent: percent(mean(late, "silent")),
    moved: number(mean(late, "moved")), early: number(mean(early, "moved")),
  });
}

/** An answer's tokens, each colored by how hard this step pushed it; `most`: the group's largest push. */
const pushed = ({ tokens, pushes }, most) => tokens.map((token, t) => {
  const x = pushes[t], shown = token === END ? "■" : VOCABULARY_WORDS[token];
  const element = h("span", {
    class: `pushed ${x > 0 ? "likelier" : x < 0 ? "rarer" : ""}`, title: text("push", { push: signed(x, 4) }),
  }, shown);
  // By its root: else all but the largest would look alike.
  if (x) element.style.setProperty("--strength", `${Math.round(100 * Math.sqrt(Math.abs(x) / most))}%`);
  return element;
});

export function trainRoom(place) {
  const toggle = () => (training.running ? (training.running = false, listener()) : train());
  const go = button("", toggle, { class: "main", id: "train_go" });
  const reset = button(text("reset"), () => { if (mayDiscard()) restart(); }, { id: "train_reset" });
  // Loaded anew without settings in its address, the page goes on with what it has kept.
  const back = button(text("train_back"), () => {
    history.replaceState(null, "", addressOf("train").replace(/&mission=\w+/, ""));
    location.reload();
  }, { id: "train_back" });
  const bar = h("progress", {
    id: "progress", max: settings.steps, value: 0, "aria-label": text("train_progress"),
  });
  const status = h("p", { id: "train_told", "aria-live": "off" });
  const figures = h("div", { class: "figures", id: "figures" }), curves = h("div", { class: "curves" });
  const learned = h("div", { class: "notice", id: "learned" }), before = quiet("ghost_none");
  const changed = h("p", { class: "quiet", id: "train_changed" });
  const silence = h("p", { class: "notice", id: "train_silent" });
  // Buttons that stay: one that is replaced with every step could not be clicked, and would lose the focus.
  const chosen = Array.from({ length: BATCH }, (_, i) => button(String(i + 1), () => {
    training.group = i;
    show();
  }, { id: `group_${i + 1}`, "aria-label": text("group_number", { i: i + 1 }) }));
  const heading = h("h3"), rows = h("div");
  const group = h("div", { id: "train_group" }, heading, h("div", { class: "controls" }, chosen), rows);
  let wasStarted, verdictAt;

  function showStatus() {
    const { step, running, seconds, fault, waiting } = training, { steps } = training.run ?? settings;
    const started = step > 0 || running, each = step ? seconds / step : 0;
    const name = running ? "pause" : step === 0 ? "train_start" : step < steps ? "train_on" : "train_done";
    go.textContent = text(name);
    go.disabled = !running && step >= steps;
    bar.max = steps;
    bar.value = step;
    const kept = running || training.keeps === null ? ""
      : ` ${text(training.keeps ? "train_kept" : "train_not_kept")}`;
    const times = { step, steps, each: number(each, 2), left: Math.ceil(each * (steps - step)) };
    status.textContent = fault ? text("train_fault", { fault })
      : waiting ? text("train_waiting", { steps: waiting })
      : running && !step ? text("train_first")
      : !step ? text("train_ready")
      : text(running ? "train_told" : "train_stopped", times) + kept;
    status.className = fault ? "bad" : "";
    back.hidden = !waiting;
    for (const element of place.querySelectorAll(".fixed input, .fixed select")) element.disabled = started;
    if (wasStarted !== started) { // opens and closes by itself, once
      wasStarted = started;
      place.querySelector("#settings").open = !started;
    }
  }

  function showCurves() {
    const { step, log, heldOut, turns, last: ghost } = training, first = heldOut[0], last = heldOut.at(-1);
    const now = training.run ?? settings;
    figures.replaceChildren(...[["train_right", "right"], ["train_form", "form"]].map(([name, key]) =>
      h("span", { "data-figure": key }, text(name), " ", first ? percent(first[key]) : "–", " → ",
        h("b", {}, heldOut.length > 1 ? percent(last[key]) : "–"))));
    const points = (key, from = log) => from.filter((row) => row[key] !== null).map((row) => [row.step, row[key]]);
    const dots = (key, from = heldOut) => from.map((row) => [row.step, row[key]]);
    // The axis grows with the training.
    const reach = Math.max(step, ghost?.log.length ?? 0), end = [25, 50, 100, 200, 400].find((x) => x >= reach);
    const ofGhost = (key, dotted) => (ghost
      ? { points: points(key, ghost.log), dots: dotted ? dots(key, ghost.heldOut) : [] } : {});
    const drawn = (key, options) => curve(text(`curve_${key}`), points(key), {
      steps: end, marks: turns.map((turn) => turn.step), ...options,
      dots: options.dotted ? dots(key) : [], ghost: ofGhost(key, options.dotted),
    });
    const both = (key) => [...points(key), ...points(key, ghost?.log ?? [])].map(([, x]) => x);
    const ends = [log, ghost?.log ?? []].map((list) => axisEnd(list.map(({ kl }) => kl), 0.3));
    curves.replaceChildren(
      drawn("right", { max: 1, show: percent, dotted: true }),
      drawn("form", { max: 1, show: percent, dotted: true }),
      drawn("reward", { max: Math.max(1, ...both("reward")), min: Math.min(0, ...both("reward")) }),
      drawn("kl", { max: Math.max(...ends), show: (x) => number(x, 3) }),
      drawn("length", { max: 28, show: (x) => number(x, 1) }),
      drawn(now.updates > 1 ? "clipped" : "silent", { max: 1, show: percent }));
  }

  /** What isn't as in the course, what was turned on the way, and how the run before differs. */
  function showSettings() {
    const { turns, last: ghost } = training, now = training.run ?? settings;
    const valueOf = (name, run) => (name === "preset" ? text(`preset_${run.preset}`)
      : run[name] === "off" ? text("clip_off") : String(run[name]));
    const setting = (name) => text(`setting_${name}`);
    const differing = (other) => Object.keys(fields).filter((name) =>
      String(other[name]) !== String(now[name]) && (name !== "points" || now.preset === "mine"));
    const unlike = differing(starts(fields)); // a mission may have set it, while the settings are folded away
    const what = unlike.map((name) => `${setting(name)} ${valueOf(name, now)}`).join(", ");
    const turned = turns.map(({ step, name }) => text("turned_at", { step, name: setting(name) })).join(", ");
    changed.hidden = !unlike.length && !turns.length;
    changed.textContent = [unlike.length ? text("train_changed", { what }) : [],
      turns.length ? text("train_turned", { turned }) : []].flat().join(" ");
    before.hidden = !ghost;
    if (!ghost) return;
    const differs = differing(ghost.run).map((name) =>
      `${setting(name)} ${valueOf(name, ghost.run)} (${text("ghost_now", { value: valueOf(name, now) })})`);
    before.textContent = text("ghost", { what: differs.join(", ") || text("ghost_same") });
  }

  function showVerdict() {
    const found = compared(training);
    learned.hidden = !found;
    const at = found ? `${found[0].step} ${found[1].step}` : undefined;
    // Only when it's another one: else its place in the page would be read out again with every step.
    if (found && verdictAt !== at) learned.replaceChildren(...told(training));
    verdictAt = at;
    silence.textContent = silentTold(training);
    silence.hidden = !silence.textContent;
  }

  function showGroup() {
    const { step, shown } = training;
    group.hidden = !shown;
    if (!shown) return;
    const { questions, groups } = shown, silent = groups.map((list) => list.every(({ advantage }) => advantage === 0));
    const at = training.group < 0 ? Math.max(0, silent.indexOf(false)) : training.group; // one that teaches something
    heading.textContent = text("train_groups", { step });
    chosen.forEach((element, i) => {
      element.className = silent[i] ? "silent" : "";
      element.setAttribute("aria-pressed", String(i === at));
    });
    const most = Math.max(1e-12, ...groups[at].flatMap(({ pushes }) => pushes.map(Math.abs)));
    const { text: question, gold } = questions[at];
    rows.replaceChildren(
      h("p", {}, h("strong", {}, question), " ", text("gold"), " ", gold),
      scroll(heading.textContent, h("table", {},
        h("tr", {}, h("th", {}, text("answer")), h("th", {}, text("judged")),
          h("th", { class: "number" }, text("points")), h("th", { class: "number" }, "A")),
        groups[at].map((answer) => h("tr", {}, h("td", { class: "tokens" }, pushed(answer, most)),
          h("td", { class: answer.right ? "good" : "quiet" }, text(`judged_${judged(answer.text, gold)}`)),
          h("td", { class: "number" }, number(total(answer.points), 2)),
          h("td", { class: `number ${answer.advantage > 0 ? "good" : answer.advantage < 0 ? "bad" : ""}` },
            signed(answer.advantage)))))),
      quiet("push_about"));
  }

  function show() {
    for (const part of [showStatus, showCurves, showSettings, showVerdict, showGroup]) part();
  }

  const turned = (name) => (x) => {
    change(name, x);
    show();
  };
  const points = h("div", { class: "points" });
  function fill() {
    const set = pointsOf(settings);
    points.replaceChildren(...Object.keys(POINTS).map((name, i) => h("label", {}, text(`points_${name}`), h("input", {
      type: "number", step: 0.25, min: -10, max: 10, id: `points_${name}`, value: set[name],
      oninput: ({ target }) => {
        const list = Object.values(pointsOf(settings)), x = target.valueAsNumber;
        list[i] = Number.isFinite(x) ? Math.max(-10, Math.min(10, x)) : 0;
        preset.querySelector("select").value = settings.preset = "mine";
        turned("points")(list);
      },
      onchange: ({ target }) => { target.value = pointsOf(settings)[name]; }, // what counts is what's shown
    }))));
  }
  const preset = choice("preset", text("train_reward"),
    Object.keys({ ...PRESETS, mine: 0 }).map((name) => [name, text(`preset_${name}`)]), settings.preset, (name) => {
      if (name === "mine") settings.points = Object.values(pointsOf(settings));
      turned("preset")(name);
      fill();
    });
  fill();
  const dial = (name, label, given) => slider(name, text(label), {
    value: settings[name], change: turned(name), ...given,
  });
  const clips = fields.clip.values.map((value) => [value, value === "off" ? text("clip_off") : value]);
  place.append(h("div", { class: "lab" },
    h("div", { class: "turn" },
      h("h2", {}, text("train_title")), h("p", {}, text("train_about", { batch: BATCH })),
      h("div", { class: "controls" }, go, reset, back), bar, status, figures,
      h("div", { id: "live" }, preset,
        h("div", { class: "sliders" },
          dial("beta", "beta", { min: 0, max: 0.5, step: 0.01, show: (x) => number(x) }),
          dial("temperature", "temperature", { min: 0.5, max: 1.5, step: 0.1, show: (x) => number(x, 1) })),
        h("details", {}, h("summary", {}, text("train_points")), points)),
      h("details", { class: "fixed", id: "settings" }, h("summary", {}, text("train_settings")),
        h("div", { class: "sliders" },
          choice("clip", text("setting_clip"), clips, settings.clip, turned("clip")),
          dial("updates", "updates", { min: 1, max: 8, step: 1 }),
          dial("answers", "G", { min: 2, max: 16, step: 1 }),
          dial("rate", "rate", {
            min: -4, max: -2, step: 0.1, value: Math.log10(settings.rate),
            show: (x) => (10 ** x).toExponential(1), change: (x) => turned("rate")(Number((10 ** x).toPrecision(2))),
          }),
          dial("steps", "steps", { min: 50, max: 400, step: 50 }),
          dial("seed", "seed", { min: 0, max: 9, step: 1 }))),
      changed),
    h("div", { class: "seen" }, curves, before, group),
    h("div", { class: "verdicts" }, silence, learned)),
  quiet("curve_about"), quiet("train_needs", { count: COUNT }));
  listener = () => { if (bar.isConnected) show(); };
  show();
}
