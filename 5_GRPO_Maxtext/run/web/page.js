// The page of a run: reads the JSON in #data, draws everything with the DOM. No library, no network.
// What a model or a data set wrote is hostile: it passes through `written`, or `plain` where only text fits.
"use strict";
const data = { columns: {}, evaluations: [], health: [], dips: [], own: [], ...JSON.parse(document.getElementById("data").textContent) };
const c = data.constants ?? data.runs[0].constants;
const groupsOf = Map.groupBy(data.groups, (g) => g.step);
const keptSteps = [...groupsOf.keys()];
const wide = matchMedia("(min-width: 48rem)"); // as in page.css
const state = { step: keptSteps.at(-1) ?? 0, group: 0, answer: 0, token: 0, shown: 0, open: wide.matches };

// --- the language: English is in the code and the other one in words.json ----------------------------------
const chosenLanguage = () => ["en", "zh"].find((name) => name === new URLSearchParams(location.hash.slice(1)).get("lang"));
const lang = chosenLanguage() ?? (navigator.language.startsWith("zh") ? "zh" : "en");
const untranslated = new Set(); // for the tests

const filled = (text, values) => text.replace(/\{([^{}]+)\}/g, (place, key) => (Object.hasOwn(values, key) ? values[key] : place));
// English as it is, "{0}" for what is filled in
function tell(label, values = []) {
  if (lang !== "en" && !WORDS.labels[label]) untranslated.add(label);
  return filled((lang === "en" ? null : WORDS.labels[label]) ?? label, values);
}
const say = (strings, ...values) => tell(strings.reduce((all, part, i) => `${all}{${i - 1}}${part}`), values);
// a sentence of Python's, by its name
const spoken = ([name, values]) => filled(WORDS.sentences[name][lang],
  Object.fromEntries(Object.entries(values).map(([key, value]) => [key, Array.isArray(value) ? spoken(value) : value])));
const stop = lang === "zh" ? "" : " ", semicolon = lang === "zh" ? "；" : "; ", comma = lang === "zh" ? "，" : ", ";

// --- making elements -------------------------------------------------------------------------------------
const at = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null));
  return element;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// Control, formatting (bidirectional, zero width), private and unassigned characters, lone surrogates: each
// is shown by its number. A line feed is shown and obeyed.
const ODD = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Cn}\p{Zl}\p{Zp}]/gu;

const named = (character) =>
  character === "\n" ? "⏎" : `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
const plain = (text) => text.replace(ODD, named);
// `text` in pieces between which a line may end
const breakable = (text, place) => text.split(place).flatMap((part, i) => (i ? [el("wbr"), part] : [part]));

function written(text) {
  const nodes = [];
  let last = 0;
  for (const match of text.matchAll(ODD)) {
    nodes.push(...breakable(text.slice(last, match.index), /(?=<)/));
    nodes.push(el("span", { class: "odd" }, named(match[0])));
    if (match[0] === "\n") nodes.push("\n");
    last = match.index + match[0].length;
  }
  nodes.push(...breakable(text.slice(last), /(?=<)/));
  return nodes.filter((node) => node !== "");
}

const number = (value, digits = 3) =>
  value === null || Number.isNaN(value) ? "–" : value.toFixed(digits).replace(/^-(?=0[.]?0*$)/, "").replace("-", "−");
const points = (value) => number(value, Number.isInteger(value * 10) ? 1 : 3);
const inner = (value, digits = 3) => number(value, digits).replace(/^−.*/, "($&)");
const signed = (value, digits = 3) => (number(value, digits).startsWith("−") ? "" : "+") + number(value, digits);
const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => sum(values) / values.length;
const fewer = (shown, all) => (shown < all ? say` (the page: ${shown} of ${all}, to stay small)` : "");

// A long text is folded: a page of fifty of them could not be read on a phone.
const LONG = 280, BEGINNING = 120;
function foldable(text, open = false) {
  if (text.length <= LONG) return el("div", { class: "written" }, ...written(text));
  const beginning = Array.from(text.slice(0, BEGINNING + 2)).slice(0, BEGINNING).join("");
  return el("details", { class: "long", open },
    el("summary", {}, el("span", { class: "written" }, ...written(beginning)), el("span", { class: "quiet" }, say` … all ${text.length} characters`)),
    el("div", { class: "written" }, ...written(text)));
}

// --- curves ----------------------------------------------------------------------------------------------
const LEFT = 34, RIGHT = 6, TOP = 8, BOTTOM = 18;

// title, columns and their names, the line of meaning, how a value is shown, the axis' end; the first two are large
const CURVES = [
  ["Held-out questions: right, sampled", { held_out_correct: "in the format asked for", held_out_correct_lenient: "by the last number" },
    "Questions it never trained on, answered as in training: does what it learned carry over?", percent, 1],
  ["Held-out questions: right, greedy", { held_out_greedy_correct: "in the format asked for", held_out_greedy_correct_lenient: "by the last number" },
    "The same questions, always the likeliest token: what the model would answer if you used it.", percent, 1],
  ["Reward, mean of the step's answers", { reward: "reward" }, "What training raises. Does it rise while the answers don't get better? Then it's being gamed.", points],
  ["Right answers of the step", { correct: "in the format asked for", correct_lenient: "by the last number" },
    "On training questions. Far above the held-out curve: learned by heart.", percent, 1],
  ["Format", { format_ok: "share of well-formed answers" }, "It usually comes first, because it's easy to learn.", percent, 1],
  ["Groups without signal", { zero_variance: "share: all answers earn the same" }, "They teach nothing. Many at the end: little is left to learn.", percent, 1],
  ["KL to the starting model, nats per token", { kl: "KL" }, "How far it has moved. One spike is a single odd token; a level that keeps rising isn't.", number],
  ["Entropy, nats per token", { entropy: "entropy" }, "How undecided it is. Near 0 all answers are alike, and nothing is left to choose from.", number],
  ["Length, tokens per answer", { length: "length" }, "Growing without better answers: it has learned to ramble.", (value) => number(value, 1)],
];
const CLASSES = ["first", "second"];
const charts = [];
const runs = data.runs ?? [data];
const lastStep = Math.max(1, ...runs.flatMap((run) => run.columns.step ?? []), ...keptSteps);

// Where an axis ends. One drawn token can raise a step's KL thirtyfold: such a spike leaves the axis (▲).
// Not the 95th percentile: of twenty steps that is the second largest, and a run that goes wrong has several spikes.
function axisTop(values) {
  const sorted = values.toSorted((a, b) => a - b), most = sorted.at(-1), usual = sorted[Math.floor(0.75 * (sorted.length - 1))];
  return usual > 0 && most > 5 * usual ? 2 * usual : most || 1;
}
const measuredIn = (values) => (values ?? []).filter((value) => value !== null);

// Of two runs each chart has the first column of both; of one run all of its columns.
function linesOf(names) {
  const [first] = Object.keys(names);
  if (data.right === "episode") names = Object.fromEntries(Object.keys(names).slice(0, 1).map((name) => [name, name.includes("correct") ? "episodes that succeed" : names[name]]));
  const wanted = data.kind === "compare" ? data.runs.map((run, i) => [run, first, plain(data.names[i])])
    : Object.keys(names).map((name) => [data, name, tell(names[name])]);
  return wanted.map(([run, name, label], i) => ({
    label, kind: CLASSES[i], steps: run.columns.step ?? [], values: run.columns[name] ?? [], ranges: run.intervals?.[name] ?? [],
  })).filter(({ values }) => data.kind === "compare" || measuredIn(values).length);
}

function drawCurves() {
  CURVES.forEach(([title, names, meaning, show, most], i) => {
    if (title.startsWith("Reward") && paidDifferently()) return;
    if (title === "Format" && data.right === "episode") return;
    if (title.startsWith("Right") && data.right === "episode") [title, meaning] = ["Episodes of the step that succeed", "On training questions."];
    if (title.startsWith("KL") && c.TEACHER) [title, meaning] = ["KL to the teacher, nats per token", "How far the model still is from its teacher: it should fall."];
    const lines = linesOf(names);
    if (lines.some(({ values }) => measuredIn(values).length)) drawCurve(tell(title), lines, tell(meaning), show, most, i < 2);
  });
  if (paidDifferently()) at("charts").before(el("p", {}, tell("The two runs were paid by different rewards, so their reward curves aren't compared.")));
  at("dips").replaceChildren(...data.dips.map(([, clear, dip]) => el("li", {}, spoken(dip) + stop + (clear ? "" : tell("Chance can do that.")))));
}

function drawCurve(title, lines, meaning, show, most, large) {
  const width = large ? 480 : 300, height = large ? 210 : 130;
  const found = lines.flatMap(({ values }) => measuredIn(values));
  const low = most ? 0 : Math.min(0, ...found), high = most ?? axisTop(found);
  const first = Math.min(...lines.flatMap(({ steps }) => steps));
  const x = (step) => LEFT + ((step - first) / (lastStep - first || 1)) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - ((Math.min(value, high) - low) / (high - low || 1)) * (height - TOP - BOTTOM);
  const [whole] = lines.map(({ values }) => measuredIn(values)), way = data.kind === "run" ? `: ${show(whole[0])} → ${show(whole.at(-1))}` : "";
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: height - BOTTOM });
  const picture = svg(
    "svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    ...[low, high].flatMap((value) => [
      svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 3, y: y(value) + 3, "text-anchor": "end" }, show(value).replace(".0 %", " %")),
    ]),
    svg("text", { x: LEFT, y: height - 5 }, `${first}`),
    svg("text", { x: width - RIGHT, y: height - 5, "text-anchor": "end" }, say`step ${lastStep}`),
    ...lines.flatMap(({ kind, steps, values, ranges }) => {
      const seen = steps.map((step, k) => [step, values[k]]).filter(([, value]) => value !== null);
      const path = seen.map(([step, value], k) => `${k ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`);
      const dots = seen.length > 40 ? [] : seen.map(([step, value]) => svg("circle", { class: kind, cx: x(step), cy: y(value), r: 2 }));
      const spikes = seen.filter(([, value]) => value > high).map(([step]) => svg("text", { class: "spike", x: x(step), y: TOP, "text-anchor": "middle" }, "▲"));
      const bars = steps.flatMap((step, k) => (ranges[k] ? [svg("line", { class: kind, x1: x(step), x2: x(step), y1: y(ranges[k][0]), y2: y(ranges[k][1]) })] : []));
      return [svg("path", { class: kind, d: path.join("") }), ...dots, ...bars, ...spikes];
    }),
    cursor,
  );
  const choose = (event) => {
    const box = picture.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * width - LEFT) / (width - LEFT - RIGHT);
    setStep(Math.round(first + Math.min(1, Math.max(0, share)) * (lastStep - first)));
  };
  picture.addEventListener("pointerdown", choose);
  picture.addEventListener("pointermove", (event) => event.buttons && choose(event));
  const caption = el("figcaption");
  at(large ? "held_out" : "charts").append(el("figure", {}, el("b", {}, title, way), picture, caption));
  charts.push((step) => {
    cursor.setAttribute("x1", x(Math.max(step, first)));
    cursor.setAttribute("x2", x(Math.max(step, first)));
    const shown = lines.map(({ label, kind, steps, values, ranges }) => {
      let k = steps.findLastIndex((other) => other <= step);
      while (k > 0 && values[k] === null) k--;
      const value = k < 0 ? null : values[k];
      const when = k >= 0 && steps[k] !== step && value !== null ? say` (step ${steps[k]})` : "";
      const between = k >= 0 && ranges[k] ? ` [${say`${(100 * ranges[k][0]).toFixed(1)} to ${(100 * ranges[k][1]).toFixed(1)}`}]` : "";
      return el("span", { class: kind }, ` ${lines.length > 1 ? "■ " : ""}${label} ${value === null ? "–" : show(value)}${between}${when}`);
    });
    const peak = Math.max(...found), { steps, values } = lines.find((line) => line.values.includes(peak));
    const beyond = peak > high ? say` ▲ the axis ends at ${show(high)}; ${found.filter((value) => value > high).length} of ${found.length} values are above it, up to ${show(peak)} (step ${steps[values.indexOf(peak)]})` : "";
    caption.replaceChildren(el("span", { class: "meaning" }, meaning), ...shown, beyond);
  });
}

function changedConstants() {
  const [a, b] = (data.runs ?? [{}, {}]).map((run) => run.constants ?? {});
  return Object.keys({ ...a, ...b }).map((name) => [name, `${a[name] ?? ""}`, `${b[name] ?? ""}`]).filter(([, left, right]) => left !== right);
}

// Two runs whose rewards have other names or other points: their curves would compare apples and pears.
function paidDifferently() {
  if (data.kind !== "compare") return false;
  const paid = data.runs.map((run) => Object.keys(run.columns).filter((name) => /^reward_/.test(name)).sort().join());
  return paid[0] !== paid[1] || changedConstants().some(([name]) => ["REWARD_FUNC", "REWARDS", "OVERLONG_PENALTY", "OVERLONG_BUFFER"].includes(name));
}

// --- the step --------------------------------------------------------------------------------------------
function nearestKept(step) {
  return keptSteps.reduce((best, kept) => (Math.abs(kept - step) < Math.abs(best - step) ? kept : best), keptSteps[0]);
}

function setStep(step) {
  const before = nearestKept(state.step);
  state.step = step;
  at("step").value = step;
  at("step_shown").textContent = say`${step} of ${at("step").max}`;
  for (const draw of charts) draw(step);
  markTime();
  if (keptSteps.length && (nearestKept(step) !== before || !at("answers").childElementCount)) drawStep();
}

function toKept(direction) {
  const others = keptSteps.filter((kept) => (kept - state.step) * direction > 0);
  if (others.length) setStep(direction > 0 ? Math.min(...others) : Math.max(...others));
}

// --- one group -------------------------------------------------------------------------------------------
const group = () => groupsOf.get(nearestKept(state.step))[state.group];

// A function of METHOD's file takes the place of a formula that we know: we name it, and show what the run logged.
const isOwn = (name) => data.own.includes(name);
const own = (name) => say`your own ${name} (${plain(c.METHOD.split("/").at(-1))})`;

const spread = (values) => Math.sqrt(sum(values.map((x) => (x - mean(values)) ** 2)) / (values.length - 1));
// GDPO: each reward by itself, relative to its group
const normalized = (g, i, name) => {
  const values = g.completions.map((a) => a.points[name]);
  return (values[i] - mean(values)) / (spread(values) + 1e-6);
};

// By ADVANTAGE, of answer i: the formula, and the same with this group's rewards R. Where A is linear in R, `scale`
// divides each reward's share of it; `share` gives it otherwise. Without either we don't know the shares.
const ADVANTAGES = {
  group(R, i) {
    const m = mean(R), std = spread(R), A = (R[i] - m) / (std + 1e-6);
    return { name: "GRPO: A = (R − mean(R)) / std(R)", group: { mean: m, std }, scale: std + 1e-6,
      shown: ` = (${points(R[i])} − ${inner(m)}) / ${number(std)} = ${number(A)}` };
  },
  centered(R, i) {
    const m = mean(R);
    return { name: "Dr. GRPO: A = R − mean(R)", group: { mean: m }, scale: 1,
      shown: ` = ${points(R[i])} − ${inner(m)} = ${number(R[i] - m)}` };
  },
  rloo(R, i) {
    const others = (sum(R) - R[i]) / (R.length - 1);
    return { name: tell("RLOO: A = R − mean of the other answers"), group: { mean: mean(R) }, scale: (R.length - 1) / R.length,
      shown: ` = ${points(R[i])} − ${inner(others)} = ${number(R[i] - others)}` };
  },
  maxrl(R, i) {
    const m = mean(R), A = (R[i] - m) / (m || 1);
    return { name: "MaxRL: A = (R − mean(R)) / mean(R)", group: { mean: m }, scale: m || 1,
      shown: ` = (${points(R[i])} − ${inner(m)}) / ${number(m)} = ${number(A)}` };
  },
  gdpo(R, i, g) {
    const { advantage, points: earned } = g.completions[i];
    const S = sum(Object.keys(earned).map((name) => normalized(g, i, name)));
    return { name: tell("GDPO: S = sum over the rewards of (R − mean(R)) / std(R);  A = (S − mean(S)) / std(S), over the step"),
      share: (name) => (S ? (normalized(g, i, name) * advantage) / S : 0), shown: ` = ${number(S)} / std(S) = ${number(advantage)}` };
  },
  none: () => ({ name: tell("ADVANTAGE=none: A = 0, only the KL to the teacher trains"), shown: "" }),
  turn: () => ({ name: tell("A of a turn = (R from this turn on − mean(R)) / std(R), over the group"), shown: "" }),
};

function advantage(g, i, t = 0) {
  const R = g.completions.map((a) => a.reward);
  return isOwn("advantage") ? { name: `A: ${own("advantage")}`, shown: ` = ${number(advantageOf(g.completions[i], t))}` } : ADVANTAGES[c.ADVANTAGE](R, i, g);
}

const equalRewards = (g) => new Set(g.completions.map((a) => a.reward)).size === 1;
// Of other advantages than those of the sum R, equal rewards say nothing.
const isSilent = (g) => (advantage(g, 0).scale !== undefined ? equalRewards(g)
  : c.ADVANTAGE !== "none" && g.completions.every((a) => (a.advantages ?? [a.advantage]).every((A) => A === 0)));

function drawStep() {
  const step = nearestKept(state.step), groups = groupsOf.get(step);
  state.group = Math.min(state.group, groups.length - 1);
  const silent = groups.filter(isSilent).length;
  at("kept").textContent = data.kind === "run"
    ? say`Step ${step}: ${groups.length} questions, ${groups[0].completions.length} answers each; ${silent} of ${groups.length} groups have no signal (dashed).` + stop +
      say`Kept are the first step, the last and one in ${c.LOG_ANSWERS_EVERY}${data.thinned ? tell(" (the page: fewer, to stay small)") : ""}.`
    : "";
  at("groups").replaceChildren(...groups.map((g, i) => el(
    "button", {
      type: "button", role: "tab", "aria-selected": i === state.group, tabindex: i === state.group ? 0 : -1,
      class: isSilent(g) ? "silent" : "", title: isSilent(g) ? tell("no signal") : "",
      "aria-label": say`question ${i + 1}` + (isSilent(g) ? comma + tell("no signal") : ""),
      onclick: () => setGroup(i),
    }, `${i + 1}`)));
  at("groups").hidden = groups.length < 2;
  drawGroup();
}

function setGroup(i) {
  state.group = i;
  [...at("groups").children].forEach((button, k) => {
    button.setAttribute("aria-selected", k === i);
    button.tabIndex = k === i ? 0 : -1;
  });
  drawGroup();
}

function silence(g) {
  const all = (name) => g.completions.every((a) => a[name]);
  const none = (name) => g.completions.every((a) => !a[name]);
  const texts = new Set(g.completions.map((a) => a.pieces.join(""))).size;
  const said = [advantage(g, 0).scale === undefined ? tell("Every A is 0: this group teaches nothing.")
    : say`All ${g.completions.length} answers earn ${points(g.completions[0].reward)} points: R − mean(R) = 0, so every A is 0 and this group teaches nothing.`];
  if (all("correct")) said.push(tell("All are right: the model has learned this question."));
  else if (none("correct")) said.push(tell("None is right: there is nothing better to choose."));
  else if (equalRewards(g)) said.push(tell("Right and wrong answers earn the same here."));
  if (texts === 1) said.push(tell("They are the same text, word for word."));
  if (c.ZERO_VARIANCE_GROUPS !== "keep") said.push(tell("It is left out of the loss."));
  return said.join(stop);
}

function drawGroup() {
  const g = group(), silent = isSilent(g);
  const deltas = g.completions.flatMap((a, i) => (a.log_prob_after ?? []).map((value, t) => [isWorlds(a, t) ? 0 : Math.abs(value - a.log_prob[t]), i, t]));
  const most = deltas.reduce((a, b) => (b[0] > a[0] ? b : a), [0, 0, 0]);
  [, state.answer, state.token] = most;
  state.open &&= wide.matches; // on a phone the formula comes with a tap on a token, never unasked
  const rewards = g.completions.map((a) => a.reward), how = g.graded === false ? null : advantage(g, 0);
  at("group").replaceChildren(
    el("p", { class: "question" }, ...written(g.question)),
    el("p", {}, rightAnswer(), el("b", {}, ...(g.answer === null ? [tell("not known")] : written(g.answer))),
      ...(new Set(data.groups.map((other) => other.data_source)).size > 1 ? [tell(", data source: "), ...written(g.data_source)] : [])),
    ...(how === null ? [] : [el("p", { class: "math" },
      `${how.name};  R = ${rewards.map(points).join(", ")}` +
      (how.group ? `;  ${Object.entries(how.group).map(([name, value]) => `${name} = ${number(value)}`).join(", ")}` : ""))]),
    ...(silent && how !== null ? [el("p", { class: "notice" }, silence(g))] : []),
    ...(data.kind === "run" && most[0] === 0 && !silent ? [el("p", { class: "notice" }, tell("The update changed no token here: in the first step of the warm-up the learning rate is 0."))] : []),
    ...(data.compared ? [el("p", { class: "legend quiet" },
      el("span", { class: "token up", "data-strength": ".5" }, data.kind === "run" ? tell("the update raised the token") : tell("training raised the token")),
      el("span", { class: "token down", "data-strength": ".5" }, tell("lowered it")),
      tell("the stronger the color, the larger the change of its log-probability"))] : []),
    el("p", { class: "quiet" }, tell("Click a token, or use the arrow keys, to see its formula.")),
  );
  for (const legend of at("group").querySelectorAll("[data-strength]")) legend.style.setProperty("--strength", "40%");
  const order = g.completions.map((_, i) => i).sort((a, b) => g.completions[b].advantage - g.completions[a].advantage || a - b);
  const alike = Map.groupBy(order, (i) => JSON.stringify([g.completions[i].pieces, g.completions[i].reward, g.completions[i].counts]));
  at("answers").replaceChildren(...[...alike.values()].map((equal) => drawAnswer(g, equal)));
  for (const equal of alike.values()) if (equal.includes(state.answer)) [state.answer] = equal;
  drawFormula();
}

// Of an episode: what the world wrote is read and not trained, and each turn can have an advantage of its own.
const isWorlds = (a, t) => a.turn !== undefined && a.turn[t] < 0;
const advantageOf = (a, t) => a.advantages?.[t] ?? a.advantage;
const isPerToken = (a) => a.advantages?.some((A, t) => !isWorlds(a, t) && A !== a.advantage) ?? false;

function verdict(a, graded = true) {
  const badge = (good, text) => el("span", { class: `badge ${good ? "good" : "bad"}` }, text);
  const almost = data.right === "score" ? "the last number is right, the score is below 1" : "right, but in a wrong format";
  if (data.right === "episode") return [
    badge(a.correct, tell(a.correct ? "succeeds" : "doesn't succeed")),
    a.cut_off ? badge(false, tell("cut off")) : null,
  ];
  return [
    graded ? badge(a.correct, tell(a.correct ? "right" : a.correct_lenient ? almost : "wrong")) : null,
    badge(a.format_ok, tell(a.format_ok ? "format right" : "format wrong")),
    a.cut_off ? badge(false, tell("cut off")) : null,
    a.counts === false ? badge(false, tell("not in the loss")) : null,
  ];
}

// A card for the answers with these numbers, which are the same text.
function drawAnswer(g, equal) {
  const [i] = equal, a = g.completions[i], graded = g.graded !== false;
  const tokens = a.pieces.map((piece, t) => {
    const world = isWorlds(a, t), change = a.log_prob_after && !world ? a.log_prob_after[t] - a.log_prob[t] : 0;
    const begins = a.turn && !world && a.turn[t] !== a.turn[t - 1];
    const token = el("span", {
      class: `token ${world ? "world" : change > 0 ? "up" : change < 0 ? "down" : ""}`, role: "option", "data-answer": i, "data-token": t,
      tabindex: -1, "aria-selected": false,
      // not mouseenter: that also comes when the page moves under a mouse that rests
      onmousemove: () => choose(i, t), onclick: () => choose(i, t, true), onfocus: () => choose(i, t),
    }, ...(piece === "" ? [el("span", { class: "odd" }, "·")] : written(piece)));
    token.style.setProperty("--strength", `${(55 * (1 - Math.exp(-3 * Math.abs(change)))).toFixed(1)}%`);
    return [begins ? el("span", { class: "begins" }, say`turn ${a.turn[t] + 1}, A = ${signed(a.advantages[t], 2)}`) : "", token, el("wbr")];
  });
  return el("article", { class: a.counts === false ? "uncounted" : "", "data-answer": i },
    el("h3", {}, equal.length > 1 ? say`Answers ${equal.map((k) => k + 1).join(", ")}` : say`Answer ${i + 1}`,
      ...(equal.length > 1 ? [el("span", { class: "equal" }, `× ${equal.length}`)] : []), ...(graded && !isPerToken(a) ? [el("span", {}, `A = ${signed(a.advantage, 2)}`)] : []), ...verdict(a, graded)),
    el("div", { class: "written", role: "listbox", "aria-label": say`tokens of answer ${i + 1}`, "aria-orientation": "horizontal", onkeydown: move }, ...tokens),
    // an image runs no script and loads nothing, whatever the world has drawn
    ...(a.picture ? [el("img", { alt: tell("what the world draws of this episode"), src: `data:image/svg+xml,${encodeURIComponent(a.picture.toWellFormed().replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" '))}` })] : []),
    ...(graded ? [drawPoints(g, i)] : []));
}

// Where A is a sum, since R is, each reward function's share of it shows which reward pushes the answer.
function drawPoints(g, i) {
  const { scale, share } = advantage(g, i), a = g.completions[i], silent = isSilent(g), known = scale !== undefined || share !== undefined;
  const ofReward = (name) => (silent ? 0 : share ? share(name) : (a.points[name] - mean(g.completions.map((other) => other.points[name]))) / scale);
  const cell = (text) => el("td", { class: "number" }, text);
  const rows = Object.keys(a.points).map((name) => {
    const bar = el("span"), cells = [el("td", {}, ...breakable(name, /(?<=_)/)), cell(points(a.points[name]))];
    if (known) {
      bar.className = `bar ${ofReward(name) > 0 ? "up" : "down"}`;
      bar.style.width = `${Math.min(4, Math.abs(ofReward(name))) * 1.2}rem`;
      cells.push(cell(signed(ofReward(name), 2)), el("td", {}, bar));
    }
    return el("tr", {}, ...cells);
  });
  const names = known ? ["reward", "points", "share of A", ""] : ["reward", "points"];
  return el("table", { class: "bars" },
    el("thead", { class: "quiet" }, el("tr", {}, ...names.map((name, k) => el("td", { class: k % 3 ? "number" : "" }, name && tell(name))))),
    el("tbody", {}, ...rows, el("tr", {}, el("td", {}, tell("sum")), cell(points(a.reward)), ...(known ? [cell(signed(a.advantage, 2)), el("td")] : []))));
}

const tokenAt = (i, t) => document.querySelector(`.token[data-answer="${i}"][data-token="${t}"]`);

function choose(i, t, asked = false) {
  if (!asked && (!state.open || (i === state.answer && t === state.token))) return;
  openFormula(true, i, t);
  if (!asked) return;
  tokenAt(i, t).focus({ preventScroll: true });
  tokenAt(i, t).scrollIntoView({ block: "nearest" }); // its margins keep it clear of slider and formula
}

function openFormula(open, answer = state.answer, token = state.token) {
  Object.assign(state, { open, answer, token });
  drawFormula();
}

function closeFormula() {
  openFormula(false);
  tokenAt(state.answer, state.token).focus({ preventScroll: true });
}

function move(event) {
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    return choose(Number(event.target.dataset.answer), Number(event.target.dataset.token), true);
  }
  const lengths = group().completions.map((a) => a.pieces.length);
  const order = [...at("answers").children].map((card) => Number(card.dataset.answer));
  let answer = Number(event.target.dataset.answer), token = Number(event.target.dataset.token);
  if (event.key === "ArrowRight") token = Math.min(token + 1, lengths[answer] - 1);
  else if (event.key === "ArrowLeft") token = Math.max(token - 1, 0);
  else if (event.key === "Home") token = 0;
  else if (event.key === "End") token = lengths[answer] - 1;
  else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    const place = order.indexOf(answer) + (event.key === "ArrowDown" ? 1 : -1);
    if (place < 0 || place >= order.length) return;
    answer = order[place];
    token = Math.min(token, lengths[answer] - 1);
  } else return;
  event.preventDefault();
  choose(answer, token, true);
}

// --- the loss of one token, with its numbers -------------------------------------------------------------
const KL = {
  low_var_kl: ["exp(d) − d − 1  (k3)", (d) => Math.exp(d) - d - 1],
  kl: ["−d  (k1)", (d) => -d],
  mse_kl: ["d² / 2  (k2)", (d) => (d * d) / 2],
};

// By LOSS_AGG_MODE: a token's weight in J, in a step of N answers, in an answer of n tokens.
const WEIGHTS = {
  "seq-mean-token-mean": (N, n) => [say`1 / (${N} answers × ${n} tokens)`, 1 / (N * n)],
  "token-mean": (N, n, all) => [say`1 / ${all} tokens of the step`, 1 / all],
  "seq-mean-token-sum": (N) => [say`1 / ${N} answers`, 1 / N],
  "seq-mean-token-sum-norm": (N) => [say`1 / (${N} answers × ${c.TOTAL_GENERATION_STEPS} tokens, the limit)`, 1 / (N * c.TOTAL_GENERATION_STEPS)],
};

// A ratio with its line: of the token, and GSPO's of the whole answer.
function ratioOfToken(a, t) {
  const ratio = Math.exp(a.log_prob_after[t] - a.log_prob[t]);
  return [ratio, `ratio = exp(log π − log π_old) = exp(${number(a.log_prob_after[t])} − ${inner(a.log_prob[t])}) = ${number(ratio)}`];
}
function ratioOfAnswer(a) {
  const log = mean(a.log_prob_after.map((value, k) => value - a.log_prob[k]).filter((_, k) => !isWorlds(a, k)));
  return [Math.exp(log), say`ratio = exp(mean over the answer's tokens of log π − log π_old) = exp(${number(log)})` + ` = ${number(Math.exp(log))}`];
}
function clipLines([ratio, line], A, low, high) {
  const clipped = Math.min(high, Math.max(low, ratio)), binds = clipped * A < ratio * A;
  return [line, `min(ratio × A, clip(ratio, ${number(low, 2)}, ${number(high, 2)}) × A) = min(${number(ratio)} × ${inner(A)}, ${number(clipped)} × ${inner(A)}) = ${number(Math.min(ratio * A, clipped * A))}` +
    (binds ? tell("   ← the clip binds: another update on this batch would have no gradient here") : "")];
}

// By LOSS_ALGO: the lines of the objective of token t, with advantage A.
const OBJECTIVES = {
  grpo: (a, t, A) => clipLines(ratioOfToken(a, t), A, 1 - c.EPSILON, 1 + c.EPSILON),
  dapo: (a, t, A) => clipLines(ratioOfToken(a, t), A, 1 - c.EPSILON, 1 + c.EPSILON_HIGH),
  "gspo-token": (a, t, A) => clipLines(ratioOfAnswer(a), A, 1 - c.EPSILON, 1 + (c.EPSILON_HIGH || c.EPSILON)),
};

function lossLines(g, a, t) {
  const lines = isOwn("objective") ? [say`objective: ${own("objective")}`] : OBJECTIVES[c.LOSS_ALGO](a, t, advantageOf(a, t));
  if (c.SAMPLER_CORRECTION) lines.push(say`times the weight π_old / π_sampler, at most ${c.SAMPLER_CORRECTION} (SAMPLER_CORRECTION); the page doesn't have that number`);
  if (c.ENTROPY_COEF) lines.push(say`plus ${c.ENTROPY_COEF} × the entropy of π here (ENTROPY_COEF); the page doesn't have that number`);
  if (a.log_prob_reference) {
    const d = a.log_prob_reference[t] - a.log_prob_after[t];
    const line = `d = log π_ref − log π = ${number(a.log_prob_reference[t])} − ${inner(a.log_prob_after[t])} = ${number(d)};  KL = `;
    const [formula, value] = isOwn("kl") ? [own("kl")] : KL[c.KL_LOSS_MODE];
    lines.push(line + formula + (value ? ` = ${number(value(d), 4)};  β × KL = ${number(g.beta, 3)} × ${number(value(d), 4)} = ${number(g.beta * value(d), 5)}` : `;  β = ${number(g.beta, 3)}`));
  } else lines.push(tell("β = 0: no KL, no reference model"));
  if (isOwn("weights")) return [...lines, say`weight in J: ${own("weights")}`];
  const trained = a.pieces.filter((_, k) => !isWorlds(a, k)).length;
  const [inWords, w] = WEIGHTS[c.LOSS_AGG_MODE](g.completions_in_step, trained, g.tokens_in_step);
  lines.push(say`weight in J: ${a.counts ? inWords : tell("0: this answer is not in the loss")} = ${number(a.counts ? w : 0, 5)}`);
  return lines;
}

function drawFormula() {
  const g = group(), a = g.completions[state.answer], t = state.token;
  for (const token of document.querySelectorAll(".token[data-token]")) {
    const chosen = Number(token.dataset.answer) === state.answer && Number(token.dataset.token) === t;
    token.classList.toggle("chosen", chosen && state.open);
    token.setAttribute("aria-selected", chosen);
    // one stop of the tab key per answer: its chosen token, else its first
    token.tabIndex = chosen || (Number(token.dataset.answer) !== state.answer && token.dataset.token === "0") ? 0 : -1;
  }
  at("formula").hidden = !state.open;
  const graded = g.graded !== false;
  const button = el("button", { type: "button", id: "close", "aria-label": tell("close the formula"), onclick: closeFormula }, "×");
  const head = el("p", {}, el("b", {}, tell("token “"), ...written(a.pieces[t]), tell("”")), say` of answer ${state.answer + 1}, number ${t + 1} of ${a.pieces.length}`);
  const probability = (log) => `${(100 * Math.exp(log)).toFixed(1)} %`;
  const lines = [];
  if (isWorlds(a, t)) lines.push(tell("The environment wrote this token: the model reads it and isn't trained on it."));
  else if (a.advantages && c.ADVANTAGE === "turn") lines.push(say`A of turn ${a.turn[t] + 1} = ${number(advantageOf(a, t))}: what it earns from here on, against the group (ADVANTAGE=turn)`);
  else if (graded) {
    const how = advantage(g, state.answer, t);
    lines.push(how.name + (isSilent(g) && how.scale !== undefined ? ` = ${tell("0: all rewards are equal")}` : how.shown) +
      (c.ADVANTAGE_CLIP && Math.abs(a.advantage) >= c.ADVANTAGE_CLIP ? say`, clipped to ${number(a.advantage)}` : ""));
  }
  if (a.log_prob_after) {
    const [old, now] = [a.log_prob[t], a.log_prob_after[t]].map((log) => `${number(log)} (${probability(log)})`);
    const by = signed(a.log_prob_after[t] - a.log_prob[t]);
    lines.push(data.kind === "run" ? say`before the update log π_old = ${old}, after it log π = ${now}: ${by}`
      : say`before training log π_old = ${old}, after it log π = ${now}: ${by}`);
    if (data.kind === "run" && !isWorlds(a, t)) lines.push(...lossLines(g, a, t));
  } else lines.push(`log π = ${number(a.log_prob[t])} (${probability(a.log_prob[t])})`);
  const others = tell("The optimizer's momentum and the other answers move a token, too, so its sign can differ from A's.");
  const note = data.kind !== "run" || !a.log_prob_after ? null : el("p", { class: "quiet" }, (c.NUM_ITERATIONS > 1
    ? say`The numbers are those after all ${c.NUM_ITERATIONS} updates on this batch.`
    : tell("While the gradient was computed the ratio was 1 (one update per batch); these are the numbers after it.")) + stop + others);
  at("formula").replaceChildren(button, head, ...lines.map((line) => el("p", { class: "math" }, line)), ...(note ? [note] : []));
}

// --- one held-out question through time ------------------------------------------------------------------
const STORIES = {
  "all questions": () => true,
  "learned: wrong at first, right at the end": (seen) => !seen[0] && seen.at(-1),
  "lost: right at first, wrong at the end": (seen) => seen[0] && !seen.at(-1),
  "right at both ends, not in between": (seen) => seen[0] && seen.at(-1) && !seen.every(Boolean),
  "wrong at both ends, not in between": (seen) => !seen[0] && !seen.at(-1) && seen.some(Boolean),
  "never right": (seen) => !seen.some(Boolean),
  "always right": (seen) => seen.every(Boolean),
};

function drawTime() {
  const { evaluations } = data;
  at("through_time").hidden = !evaluations.length;
  if (!evaluations.length) return;
  at("time_fewer").textContent = fewer(data.asked.length, data.in_all.asked);
  const greedy = data.asked.map((_, i) => evaluations.map((e) => e.greedy_correct[i]));
  const mark = (values) => values.map((right) => (right ? "●" : "○")).join("");
  const options = Object.entries(STORIES).map(([name, holds]) => [name, greedy.filter(holds).length]);
  at("time_filter").append(...options.map(([name, count]) => el("option", { value: name }, `${tell(name)} (${count})`)));
  const offer = () => {
    const holds = STORIES[at("time_filter").value];
    const fitting = greedy.map((seen, i) => i).filter((i) => holds(greedy[i]));
    at("time_question").replaceChildren(...fitting.map((i) => el("option", { value: i }, `${mark(greedy[i])} ${plain(data.asked[i].question)}`)));
    at("time_question").disabled = !fitting.length;
    drawQuestion();
  };
  at("time_filter").addEventListener("change", offer);
  at("time_question").addEventListener("change", drawQuestion);
  offer();
}

function drawQuestion() {
  if (at("time_question").disabled) return at("time_table").replaceChildren(tell("none"));
  const i = Number(at("time_question").value), { evaluations } = data, asked = data.asked[i];
  const right = evaluations.map((e) => e.greedy_correct[i]);
  const turn = right.at(-1) ? right.lastIndexOf(false) + 1 : -1; // since when greedy is right for good
  const story = turn < 0 ? tell("At the end the greedy answer is still wrong.")
    : turn === 0 ? tell("The greedy answer was right from the start.")
      : say`The greedy answer is right from step ${evaluations[turn].step} on.`;
  const answer = (name, text, good) => el("td", { "data-name": tell(name) }, el("span", { class: good ? "good" : "bad" }, tell(good ? "right" : "wrong"), " "), foldable(text));
  at("time_table").replaceChildren(
    el("p", {}, el("b", {}, ...written(asked.question)), tell(" right answer: "), el("b", {}, ...written(asked.answer)), ` ${story}`),
    el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, ...["step", "greedy answer", "sampled answer"].map((name) => el("th", {}, tell(name))))),
      el("tbody", {}, ...evaluations.map((e, k) => el("tr", { "data-step": e.step, class: k === turn && k ? "turn" : "" },
        el("td", { class: "number", "data-name": tell("step") }, `${e.step}`),
        answer("greedy answer", e.greedy_completions[i], e.greedy_correct[i]), answer("sampled answer", e.completions[i], e.correct[i])))))));
  markTime();
}

function markTime() {
  const rows = [...at("time_table").querySelectorAll("tr[data-step]")];
  const now = rows.filter((row) => Number(row.dataset.step) <= state.step).at(-1);
  for (const row of rows) row.style.background = row === now ? "var(--card)" : "";
}

// --- before and after ------------------------------------------------------------------------------------
const TURNS = {
  "all questions": () => true,
  "turned right": (i) => !data.before.correct[i] && data.after.correct[i],
  "turned wrong": (i) => data.before.correct[i] && !data.after.correct[i],
  "right both times": (i) => data.before.correct[i] && data.after.correct[i],
  "wrong both times": (i) => !data.before.correct[i] && !data.after.correct[i],
};
const FORMS = {
  "any": () => true,
  "turned right": (i) => !data.before.format_ok[i] && data.after.format_ok[i],
  "turned wrong": (i) => data.before.format_ok[i] && !data.after.format_ok[i],
  "right at the end": (i) => data.after.format_ok[i],
  "wrong at the end": (i) => !data.after.format_ok[i],
};
const ANY_SOURCE = "all of them", PAGE = 20;

function drawBeforeAfter() {
  at("before_after").hidden = !data.after;
  if (!data.after) return;
  const every = data.before.asked.map((_, i) => i);
  const sources = [...new Set(data.before.asked.map((asked) => asked.data_source))];
  const options = (rules) => Object.entries(rules).map(([name, holds]) => el("option", { value: name }, `${tell(name)} (${every.filter(holds).length})`));
  at("both_filter").append(...options(TURNS));
  at("both_form").append(...options(FORMS));
  at("both_form_label").hidden = data.right === "episode";
  at("both_source").append(...[ANY_SOURCE, ...sources].map((name) => el("option", { value: name }, name === ANY_SOURCE ? tell(name) : plain(name))));
  at("both_source_label").hidden = sources.length < 2;
  for (const id of ["both_filter", "both_form", "both_source"]) at(id).addEventListener("change", () => listPairs());
  at("both_search").addEventListener("input", () => listPairs());
  at("both_more").addEventListener("click", () => listPairs(state.shown + PAGE));
  listPairs();
}

function listPairs(limit = PAGE) {
  const { before, after } = data, wanted = at("both_search").value.toLowerCase(), source = at("both_source").value;
  const holds = [TURNS[at("both_filter").value], FORMS[at("both_form").value]];
  const found = before.asked.map((_, i) => i).filter((i) => holds.every((rule) => rule(i))
    && (source === ANY_SOURCE || before.asked[i].data_source === source)
    && [before.asked[i].question, before.asked[i].answer, before.completions[i], after.completions[i]].some((text) => text.toLowerCase().includes(wanted)));
  state.shown = Math.min(limit, found.length);
  at("both_count").textContent = say`${found.length} of ${before.asked.length} questions` + fewer(before.asked.length, data.in_all.tested) + (found.length > state.shown ? say`, the first ${state.shown} shown` : "");
  at("both_more").hidden = found.length <= state.shown;
  const answer = (when, result, i) => el("div", {}, el("span", { class: "quiet" }, `${when} `),
    ...verdict({ correct: result.correct[i], correct_lenient: result.correct_lenient[i], format_ok: result.format_ok[i] }).filter(Boolean),
    foldable(result.completions[i], wanted !== "" && result.completions[i].toLowerCase().includes(wanted)));
  at("both_list").replaceChildren(...found.slice(0, state.shown).map((i) => el("div", { class: "pair" },
    el("div", { class: "question" }, foldable(before.asked[i].question), el("span", { class: "quiet" }, rightAnswer(), ...written(before.asked[i].answer))),
    el("div", { class: "both" }, answer(tell("before"), before, i), answer(tell("after"), after, i)))));
}

// --- the address: a link, or a reload, shows the same again ------------------------------------------------
const CONTROLS = ["time_filter", "time_question", "both_filter", "both_form", "both_source", "both_search"];
let writing = null, lastWritten = 0;

function remember({ target }) { // browsers allow about three changes of the address per second
  if (target.closest?.("a")) return; // a link's address is still to be read
  clearTimeout(writing);
  writing = setTimeout(writeAddress, Math.max(0, lastWritten + 400 - performance.now()));
}

function writeAddress() {
  lastWritten = performance.now();
  const place = { step: state.step, question: state.group + 1 }, { theme } = document.documentElement.dataset;
  if (state.open) Object.assign(place, { answer: state.answer + 1, token: state.token + 1 });
  for (const id of CONTROLS) {
    const { value, options } = at(id);
    if (value !== (options?.[0]?.value ?? "")) place[id] = value;
  }
  if (state.shown > PAGE) place.shown = state.shown;
  if (theme) place.theme = theme;
  if (state.lang) place.lang = state.lang;
  history.replaceState(null, "", `#${new URLSearchParams(place)}`);
}

function readAddress() {
  const place = new URLSearchParams(location.hash.slice(1));
  if ((chosenLanguage() ?? lang) !== lang) return location.reload(); // every text is another
  state.lang = chosenLanguage();
  const whole = (name, least, most) => Math.min(most, Math.max(least, Math.trunc(Number(place.get(name))) || least));
  if (["light", "dark"].includes(place.get("theme"))) document.documentElement.dataset.theme = place.get("theme");
  if (place.has("step")) setStep(whole("step", Number(at("step").min), Number(at("step").max)));
  if (place.has("question") && keptSteps.length) {
    setGroup(whole("question", 1, groupsOf.get(nearestKept(state.step)).length) - 1);
    const i = whole("answer", 1, group().completions.length) - 1;
    if (place.has("token")) openFormula(true, i, whole("token", 1, group().completions[i].pieces.length) - 1);
    else openFormula(false);
  }
  for (const id of CONTROLS.filter((name) => place.has(name))) {
    if (at(id).options && ![...at(id).options].some((option) => option.value === place.get(id))) continue;
    at(id).value = place.get(id);
    at(id).dispatchEvent(new Event(at(id).options ? "change" : "input"));
  }
  if (data.after && place.has("shown")) listPairs(whole("shown", PAGE, data.before.asked.length));
  if (["held_out", "curves", "inspector", "through_time", "before_after"].includes(place.get("at"))) at(place.get("at")).scrollIntoView();
}

// --- at the top: what came of it, why, and where to look next ----------------------------------------------
const place = (section, more) => `#${new URLSearchParams({ at: section, ...more, ...(state.lang && { lang: state.lang }) })}`;

// A sentence and the address of its place on this page, for the few things that deserve a look most: what is
// wrong, the root first; then what to read, so a reader knows where to begin.
const MOST = 3;

function lookNext() {
  const found = data.causes.map((line) => [spoken(line), place("curves", {})]);
  const { after, columns, evaluations } = data, names = data.headline.map(([name]) => name);
  if (names.includes("unclear")) found.push([say`Too few test questions to tell (NUM_TEST_QUESTIONS=${c.NUM_TEST_QUESTIONS}), or too few steps (NUM_BATCHES=${c.NUM_BATCHES}).`, place("before_after", {})]);
  for (const [step, clear, dip] of data.dips) if (clear) found.push([spoken(dip), place("held_out", { step })]);
  if (after) {
    const count = (holds) => after.correct.filter((_, i) => holds(i)).length;
    const lost = count(TURNS["turned wrong"]), formless = data.right === "number" ? count((i) => after.correct_lenient[i] && !after.correct[i]) : 0;
    if (lost) found.push([say`Right before and wrong after training: ${lost} of ${after.correct.length} test questions. Read them.`, place("before_after", { both_filter: "turned wrong", both_form: "any" })]);
    if (formless) found.push([say`The right number in a wrong format: ${formless} of ${after.correct.length} test answers.`, place("before_after", { both_filter: "all questions", both_form: "wrong at the end" })]);
    if (data.cut_off >= 0.01) {
      const limits = data.right === "episode" ? `MAX_TURNS=${c.MAX_TURNS}, TOTAL_GENERATION_STEPS=${c.TOTAL_GENERATION_STEPS}` : `TOTAL_GENERATION_STEPS=${c.TOTAL_GENERATION_STEPS}`;
      found.push([say`${percent(data.cut_off)} of the test answers after training are cut off at the limit (${limits}).`, place("before_after", { both_filter: "wrong both times" })]);
    }
  }
  const kl = measuredIn(columns.kl), most = Math.max(...kl), step = columns.step?.[columns.kl?.indexOf(most)];
  const next = columns.step ? measuredIn(columns.kl.filter((_, i) => columns.step[i] > step && columns.step[i] <= step + 5)).toSorted((a, b) => a - b) : [];
  if (!data.causes.length && next.length && most > axisTop(kl)) found.push([say`The KL jumps to ${number(most, 2)} at step ${step}; the median of the steps after it, up to five, is ${number(next[next.length >> 1], 2)}.`, place("curves", { step })]);
  const never = evaluations.length > 1 ? data.asked.filter((_, i) => STORIES["never right"](evaluations.map((e) => e.greedy_correct[i]))).length : 0;
  if (never) found.push([say`Never right: ${never} of ${data.asked.length} held-out questions. Too hard, or a wrong answer in the data?`, place("through_time", { time_filter: "never right" })]);
  const flat = data.headline.find(([name]) => name === "flat");
  if (flat) found.push([say`No clear gain since step ${flat[1].step}: fewer steps may do (NUM_BATCHES is ${c.NUM_BATCHES} here), or take harder questions (DATASET is ${c.DATASET}).`, place("held_out", {})]);
  if (names.includes("rising")) found.push([say`The held-out curve was still rising: more steps may help (NUM_BATCHES=${c.NUM_BATCHES}).`, place("held_out", {})]);
  return found.slice(0, MOST);
}

// What the environment does with its row's ground truth is its own affair: it may be the best return.
const rightAnswer = () => tell(data.right === "episode" ? "ground truth: " : "right answer: ");

// One test question with its answers before and after training: what the model does now, at first sight.
function drawExample() {
  at("example").hidden = !data.example;
  if (!data.example) return;
  const [before, after] = data.example;
  at("example").replaceChildren(
    el("p", { class: "question" }, ...written(before.asked.question), el("span", { class: "quiet" }, rightAnswer(), ...written(before.asked.answer))),
    el("div", { class: "both" }, ...[["before", before], ["after", after]].map(([when, one]) => el("div", {}, el("span", { class: "quiet" }, `${tell(when)} `), ...verdict(one).filter(Boolean), foldable(one.completions)))));
}

const table = (header, rows, cell) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": header[0] },
  el("table", {}, el("thead", {}, el("tr", {}, ...header.map((name) => el("th", {}, name)))), el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map(cell))))));

function drawSummary() {
  const { kind, notes = [], reasons = [], headline = [] } = data;
  const about = kind === "run" ? say`Model ${c.MODEL}, questions ${c.DATASET}, folder ${data.folder}: ${data.steps} of ${c.NUM_BATCHES} steps of ${c.BATCH_SIZE} questions × ${c.NUM_GENERATIONS} answers, seed ${c.SEED}`
    : kind === "compare" ? say`Two runs: ${data.names[0]} and ${data.names[1]}` : data.about;
  at("about").textContent = plain(about);
  at("title").textContent = plain(headline.map(spoken).join(semicolon) || tell("Answers to questions"));
  document.title = at("title").textContent;
  at("inspector_title").textContent = kind === "run" ? tell("One question, its answers, and what the update did")
    : data.compared ? tell("One question, its answers, and what training did") : tell("One question, its answers");
  at("reasons").textContent = reasons.map(spoken).join(stop);
  at("look_next").hidden = kind !== "run";
  if (kind === "run") {
    const found = lookNext();
    if (data.failed && found.length) {
      const [words, address] = found.shift();
      at("change").replaceChildren(el("a", { href: address }, ...breakable(plain(words), /(?<=_)/)));
    }
    drawExample();
    at("look_list").replaceChildren(...found.map(([words, address]) => el("li", {}, el("a", { href: address }, ...breakable(plain(words), /(?<=_)/)))));
    at("look_next").hidden = data.failed && !found.length;
    if (!found.length) at("look_list").replaceChildren(el("li", {}, tell("Nothing stands out. Read some answers all the same.")));
  }
  const { header, rows } = data.summary ?? { header: [], rows: [] };
  const cell = (text) => el("td", {}, ...text.split(/ (?=[(])/).flatMap((part, i) => (i ? [" ", el("span", { class: "range" }, part.replace(/(.+) to (.+)/, (_, from, to) => say`${from} to ${to}`))] : [part])));
  const asked = kind === "run" ? say`${data.in_all.tested} test questions, ${c.EVAL_CONFIG} sampling` : tell("the same test questions, after training");
  const names = header.map((name) => (kind === "run" ? tell(name) : plain(name)));
  const changed = changedConstants();
  at("summary").replaceChildren(
    ...(rows.length ? [table([asked, ...names], rows.map(([name, ...cells]) => [tell(name), ...cells]), cell)] : []),
    ...(changed.length ? [el("h2", {}, tell("Constants that differ")), table([tell("constant"), ...names], changed.map((cells) => cells.map(plain)), (text) => el("td", { class: "any" }, text))] : []),
    ...(data.summary?.sources?.length ? drawSources(data.summary.sources) : []),
    el("div", {}, ...notes.map((note) => el("p", { class: "note" }, typeof note === "string" ? tell(note) : plain(spoken(note)))), ...(data.best ? [el("p", {}, spoken(data.best))] : []),
      ...(kind === "run" && data.health.length ? [el("details", {}, el("summary", {}, tell("every health line, at the step where it first held")), el("ul", { id: "health" }, ...data.health.map((line) => el("li", {}, plain(spoken(line))))))] : []),
      ...(kind === "run" ? [el("details", {},
      el("summary", {}, tell("the command and all constants")), el("p", { class: "math", id: "command" }, plain(data.command)),
      ...Object.entries(c).map(([name, value]) => el("div", { class: "math" }, plain(`${name}=${value}`))))] : [])));
}

// The same shares by data_source, before and after.
function drawSources([header, ...rows]) {
  const change = (text) => text.replace(/^(\S+) to (\S+)$/, (_, from, to) => say`${from} to ${to}`);
  return [el("h3", {}, tell("By data source")), table(header.map((name) => tell(name)), rows, (text, i) => el("td", { class: "any" }, i ? change(text) : plain(text)))];
}

function start() {
  document.documentElement.lang = lang === "zh" ? "zh-Hant-TW" : "en";
  document.body.className = data.kind;
  for (const element of document.querySelectorAll("[data-say]")) element.textContent = tell(element.textContent.trim());
  for (const element of document.querySelectorAll("[aria-label]")) element.setAttribute("aria-label", tell(element.getAttribute("aria-label")));
  if (lang === "zh") for (const link of document.querySelectorAll("#home a")) link.href = link.dataset.zh;
  state.lang = chosenLanguage();
  at("both_search").placeholder = tell("in questions and answers");
  at("lang").textContent = lang === "zh" ? "English" : "中文";
  at("lang").lang = lang === "zh" ? "en" : "zh-Hant-TW";
  drawSummary();
  drawCurves();
  at("step").min = data.evaluations.length || data.kind === "compare" ? 0 : 1;
  at("step").max = lastStep;
  at("curves").hidden = !charts.length;
  at("steps").hidden = data.kind === "questions";
  at("inspector").hidden = !keptSteps.length;
  at("step").addEventListener("input", () => setStep(Number(at("step").value)));
  at("step_back").addEventListener("click", () => toKept(-1));
  at("step_on").addEventListener("click", () => toKept(1));
  for (const id of ["step_back", "step_on"]) at(id).hidden = !keptSteps.length;
  at("groups").addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key], count = at("groups").childElementCount;
    if (!move) return;
    setGroup((state.group + move + count) % count);
    at("groups").children[state.group].focus();
  });
  at("theme").addEventListener("click", () => {
    const { dataset } = document.documentElement;
    const dark = dataset.theme ? dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    dataset.theme = dark ? "light" : "dark";
  });
  at("lang").addEventListener("click", () => {
    state.lang = lang === "zh" ? "en" : "zh";
    writeAddress();
    location.reload();
  });
  drawTime();
  drawBeforeAfter();
  if (data.kind === "questions") drawStep();
  else setStep(Math.min(lastStep, nearestKept(keptSteps.find((step) => step > 1) ?? lastStep) ?? lastStep));
  readAddress();
  addEventListener("hashchange", readAddress);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((details) => { details.open = true; }));
  addEventListener("keydown", (event) => event.key === "Escape" && state.open && closeFormula());
  for (const kind of ["input", "change", "click", "keyup"]) addEventListener(kind, remember);
}
start();
