// Room 1: Q-learning on the grid of chapter 1, with slippery ground and walls.

import { flag, frame, range, remember, starts, whole, wholes } from "./address.js";
import { text } from "./texts.js";
import { button, check, formula, h, number, quiet, slider, svg } from "./dom.js";

const SIDE = 4, GOAL = SIDE * SIDE - 1, LIMIT = 100; // moves of an episode
const MOVES = [[-1, 0], [1, 0], [0, -1], [0, 1]]; // (rows, columns): up, down, left, right
const SIDEWAYS = [[2, 3], [2, 3], [0, 1], [0, 1]];
const CORNERS = ["50,50 0,0 100,0", "50,50 0,100 100,100", "50,50 0,0 0,100", "50,50 100,0 100,100"];
const PLACES = [[50, 13, "middle"], [50, 87, "middle"], [3, 50, "start"], [97, 50, "end"]]; // of a cell's numbers
const ARROWS = ["50,23 45,31 55,31", "50,77 45,69 55,69", "42,64 50,59 50,69", "58,64 50,59 50,69"];

export const fields = {
  alpha: range(0.1, 0.05, 1), gamma: range(0.99, 0.5, 1), epsilon: range(0.5, 0, 1),
  slip: range(0, 0, 0.8), speed: whole(6, 1, 1000), predict: flag, walls: wholes(1, GOAL - 1),
};
export const settings = starts(fields);
export const state = {};
const isWall = (cell) => settings.walls.includes(cell);

/** Where a move in one direction leads: a wall, or the edge, keeps the agent where it is. */
function landing(cell, action) {
  const row = Math.floor(cell / SIDE) + MOVES[action][0], column = (cell % SIDE) + MOVES[action][1];
  const next = row * SIDE + column;
  const free = row >= 0 && row < SIDE && column >= 0 && column < SIDE && !isWall(next);
  return free ? next : cell;
}

/** [probability, next cell]: with probability `slip` the agent goes to one side instead. */
export function outcomes(cell, action, slip) {
  return [
    [1 - slip, landing(cell, action)],
    ...SIDEWAYS[action].map((side) => [slip / 2, landing(cell, side)]),
  ];
}
const rewardOf = (next) => (next === GOAL ? 100 : -1);

/**
 * Bellman's optimality equation (Sutton & Barto, eq. 3.20), swept until nothing changes: q* [16][4].
 *
 * Without a discount, and no way to the goal, every sweep costs one more: such a value is -Infinity.
 */
export function optimum(gamma, slip) {
  const q = Array.from({ length: GOAL + 1 }, () => [0, 0, 0, 0]);
  let largest = 1, changes;
  for (let sweep = 0; largest > 1e-9 && sweep < 10000; sweep++) {
    largest = 0;
    changes = q.map(() => [0, 0, 0, 0]);
    for (let cell = 0; cell < GOAL; cell++) {
      for (let action = 0; action < 4; action++) {
        const value = outcomes(cell, action, slip).reduce((sum, [p, next]) =>
          sum + p * (rewardOf(next) + (next === GOAL ? 0 : gamma * Math.max(...q[next]))), 0);
        changes[cell][action] = Math.abs(value - q[cell][action]);
        largest = Math.max(largest, changes[cell][action]);
        q[cell][action] = value;
      }
    }
  }
  return q.map((row, cell) => row.map((value, action) => (changes[cell][action] > 1e-9 ? -Infinity : value)));
}

/** Cells from which the goal can be reached at all. */
export function reachable() {
  const found = new Set([GOAL]);
  for (let size = 0; size < found.size;) {
    size = found.size;
    for (let cell = 0; cell < GOAL; cell++) {
      if (!isWall(cell) && [0, 1, 2, 3].some((action) => found.has(landing(cell, action)))) found.add(cell);
    }
  }
  found.delete(GOAL);
  return [...found];
}

const greedy = (row) => [0, 1, 2, 3].filter((action) => row[action] >= Math.max(...row) - 1e-9);

/** Of the cells that lead to the goal: how many, and in how many every greedy move is an optimal one. */
export function rightMoves(q, best) {
  const cells = reachable();
  const right = cells.filter((cell) => greedy(q[cell]).every((action) => best[cell][action] >= Math.max(...best[cell]) - 1e-6));
  return { all: cells.length, right: right.length };
}

export function reset(begun = false) {
  Object.assign(state, {
    Q: Array.from({ length: GOAL + 1 }, () => [0, 0, 0, 0]), at: 0, moves: 0, episodes: 0, inEpisode: 0, last: null,
    lengths: [], asked: null, guesses: [0, 0], running: false, reached: false, begun, told: null,
  });
}
reset();
/** Called where the address has asked for another world or other settings. */
export const settled = () => reset();

/** One move and, unless it is to be predicted first, the update that it brings. */
export function move() {
  const { Q, at } = state, random = Math.random() < settings.epsilon;
  const best = Math.max(...Q[at]), ties = [0, 1, 2, 3].filter((action) => random || Q[at][action] === best);
  const action = ties[Math.floor(Math.random() * ties.length)];
  let luck = Math.random();
  const [, next] = outcomes(at, action, settings.slip).find(([p]) => (luck -= p) < 0) ?? [1, landing(at, action)];
  const future = next === GOAL ? 0 : Math.max(...Q[next]);
  const before = Q[at][action], target = rewardOf(next) + settings.gamma * future;
  const after = before + settings.alpha * (target - before);
  state.last = { at, action, next, before, after, target, future, random, reward: rewardOf(next), shown: true };
  state.told = null;
  if (settings.predict) ask();
  else learn();
}

/** The update of the last move; then the agent stands where the move has led. */
function learn() {
  const { at, action, next, after } = state.last;
  state.Q[at][action] = after;
  state.last.shown = true;
  state.asked = null;
  state.moves += 1;
  state.inEpisode += 1;
  state.at = next;
  if (next === GOAL || state.inEpisode === LIMIT) { // cut off after LIMIT moves: the update never learns of it
    state.lengths.push(state.inEpisode);
    Object.assign(state, { at: 0, inEpisode: 0, episodes: state.episodes + 1 });
  }
}

/** Three values to choose from: the right one, the whole target, and one that forgets the future. */
function ask() {
  const { before, after, target, reward } = state.last;
  state.last.shown = false;
  const wrong = [target, before + settings.alpha * (reward - before), before, after + 1, after - 1]
    .filter((value) => number(value) !== number(after));
  const options = [after, ...new Map(wrong.map((value) => [number(value), value])).values()].slice(0, 3);
  state.asked = options.sort((a, b) => a - b);
}

/** A number that fits between the edge of its cell and the middle. */
const short = (x) => {
  if (!Number.isFinite(x)) return "−∞";
  const size = Math.abs(x);
  if (size >= 999.5) return `${number(x / 1000, size < 9950 ? 1 : 0)}k`;
  return number(x, size < 9.95 ? 2 : size < 99.95 ? 1 : 0).replace(/(\.\d)0$/, "$1").replace(/^−?0\.0$/, "0");
};

function cellPicture(cell, q, shade) {
  const frame = (...parts) => svg("svg", { viewBox: "0 0 100 100", "aria-hidden": "true" }, ...parts);
  if (cell === GOAL) return frame(svg("text", { x: 50, y: 50, class: "big" }, "+100"));
  if (isWall(cell)) return frame(svg("rect", { width: 100, height: 100, class: "wall" }));
  const row = q[cell], best = greedy(row), { last } = state, here = q === state.Q && cell === state.at;
  return frame(
    CORNERS.map((points, action) => {
      const moved = q === state.Q && last && last.at === cell && last.action === action;
      return svg("polygon", {
        points, class: `${row[action] > 0 ? "positive" : row[action] < 0 ? "negative" : ""}${moved ? " moved" : ""}`,
        "fill-opacity": shade(row[action]),
      });
    }),
    PLACES.map(([x, y, anchor], action) => svg("text", { x, y, "text-anchor": anchor, class: best.length < 4 && best.includes(action) ? "best" : "" },
      short(row[action]))),
    // All four alike say nothing about where to go.
    best.length < 4 ? best.map((action) => svg("polygon", { points: ARROWS[action], class: "arrow" })) : null,
    cell === 0 ? svg("text", { x: 5, y: 12, "text-anchor": "start", class: "start" }, "S") : null,
    here ? svg("circle", { cx: 50, cy: 50, r: 6, class: "agent" }) : null);
}

/** How strong the color of a value is: the range of the whole table is spread over it. */
function shades(q) {
  const values = q.filter((_, cell) => cell !== GOAL && !isWall(cell)).flat().filter(Number.isFinite), sizes = values.map(Math.abs);
  // Where all have one sign, the smallest is the palest; else 0 is.
  const least = values.every((x) => x > 0) || values.every((x) => x < 0) ? Math.min(...sizes) : 0, most = Math.max(least + 1e-9, ...sizes);
  return (x) => (!Number.isFinite(x) ? 1 : x === 0 ? 0 : 0.15 + 0.85 * (Math.abs(x) - least) / (most - least));
}

/** `alone`: as a figure in a page, without what a chapter says better. */
export function gridRoom(place, alone = false) {
  const board = h("div", { class: "board", id: "board" }), best = h("div", { class: "board", "aria-hidden": "true" });
  const sum = h("div", { id: "grid_formula" }), told = h("p", { id: "grid_told" }), right = h("p", { id: "grid_right" });
  const guess = h("div", { class: "controls", id: "guess", "aria-live": "polite" });
  const go = button("", () => { state.running = !state.running; state.begun = true; if (state.running) tick(); show(); }, { class: "main", id: "grid_run" });
  const one = button(text("grid_step"), () => { state.running = false; state.begun = true; if (!state.asked) move(); show(); }, { id: "grid_step" });
  let target;

  const cells = Array.from({ length: GOAL + 1 }, (_, cell) => h("button", {
    type: "button", id: `cell_${cell}`, onclick: () => {
      if (cell === 0 || cell === GOAL) return;
      settings.walls = isWall(cell) ? settings.walls.filter((wall) => wall !== cell) : [...settings.walls, cell].sort((a, b) => a - b);
      if (state.at === cell) state.at = 0;
      state.last = state.asked = null;
      changed();
    },
  }));
  board.append(...cells);

  function changed() {
    remember();
    target = optimum(settings.gamma, settings.slip);
    best.replaceChildren(...target.map((_, cell) => h("div", {}, cellPicture(cell, target, shades(target)))));
    show();
  }

  function show() {
    const { Q, last, asked } = state, shade = shades(Q);
    cells.forEach((element, cell) => {
      const kind = cell === GOAL ? "grid_goal" : cell === 0 ? "grid_start" : isWall(cell) ? "grid_wall" : "grid_cell";
      const named = text(kind, { cell, best: short(Math.max(...Q[cell])) });
      element.replaceChildren(h("span", { class: "unseen" }, named), cellPicture(cell, Q, shade));
    });
    go.textContent = text(state.running ? "pause" : "grid_run");
    one.disabled = Boolean(asked);
    const { right: sure, all } = rightMoves(Q, target);
    const off = reachable().map((cell) => [Math.abs(Math.max(...Q[cell]) - Math.max(...target[cell])), cell]);
    const [away, where] = off.reduce((most, next) => (next[0] > most[0] ? next : most), [-1, null]);
    right.replaceChildren(...(all ? [text("grid_right"), " ", h("b", {}, text("of", { right: sure, all }))] : [text("grid_no_way")]));
    told.textContent = text(state.lengths.length ? "grid_told" : "grid_told_first", {
      moves: state.moves, episodes: state.episodes, last: state.lengths.at(-1),
    }) + (all ? ` ${text("grid_away", { away: number(away, 1), cell: where })}` : "");
    guess.replaceChildren();
    if (state.told) guess.append(state.told);
    if (!last) {
      sum.replaceChildren(formula("Q(S, A) ← Q(S, A) + α · (R + γ · max Q(S′, ·) − Q(S, A))", text("grid_first")));
      return;
    }
    const name = text("directions").split(",")[last.action];
    sum.replaceChildren(formula(
      "Q(S, A) ← Q(S, A) + α · (R + γ · max Q(S′, ·) − Q(S, A))",
      `Q(${last.at}, ${name}) ← ${number(last.before)} + ${settings.alpha} · (${number(last.reward, 0)} + ${settings.gamma} · `
        + `${number(last.future)} − ${number(last.before)}) = ${last.shown ? number(last.after) : "?"}`,
      text(last.next === GOAL ? "grid_end" : last.next === last.at ? "grid_bump" : "grid_went", { next: last.next })
        + " " + text(last.random ? "grid_random" : "grid_greedy"),
    ));
    if (asked) {
      guess.replaceChildren(h("span", {}, text("grid_ask")), ...asked.map((value) => button(number(value), () => {
        state.guesses[1] += 1;
        if (value === last.after) state.guesses[0] += 1;
        learn();
        state.told = h("strong", { class: value === last.after ? "good" : "bad" },
          text(value === last.after ? "grid_yes" : "grid_no", { value: number(last.after), right: state.guesses[0], all: state.guesses[1] }));
        show();
        one.focus(); // the buttons of the guess are gone
      })));
      if ([one, go].includes(document.activeElement)) guess.querySelector("button").focus();
    }
  }

  let before = performance.now(), owed = 0;
  function tick(now = performance.now()) {
    if (!state.running || !board.isConnected) return;
    owed += Math.min(0.1, (now - before) / 1000) * settings.speed; // a tab in the background owes no moves
    before = now;
    const moves = Math.floor(owed);
    owed -= moves;
    for (let i = 0; i < moves && state.running; i++) {
      move();
      // The mission asks what the table looks like now.
      const arrived = state.last.next === GOAL && !state.reached;
      if (arrived) state.reached = true;
      if (state.asked || (arrived && frame.mission === "crawl")) state.running = false;
    }
    if (moves) show();
    requestAnimationFrame(tick);
  }

  const turned = (name) => (x) => { settings[name] = x; changed(); };
  const hundred = button(text("grid_hundred"), () => {
    const { predict } = settings;
    settings.predict = false;
    state.begun = true;
    if (state.asked) learn();
    for (const end = state.episodes + 100; state.episodes < end;) move();
    settings.predict = predict;
    show();
  }, { id: "grid_hundred" });
  const restart = button(text("reset"), () => { reset(true); show(); }, { id: "grid_reset" });
  const predict = check("predict", text("grid_predict"), settings.predict, (on) => {
    settings.predict = on;
    if (state.asked) learn();
    changed();
  });
  place.append(
    ...(alone ? [] : [h("h2", {}, text("grid_title")), h("p", {}, text("grid_about"))]),
    h("div", { class: "controls" }, go, one, hundred, restart, predict),
    h("div", { class: "worlds" },
      h("div", {}, board, quiet("grid_click")),
      h("div", {}, right, sum, guess, told,
        alone ? "" : [h("div", { class: "sliders" },
          slider("alpha", text("alpha"), { min: 0.05, max: 1, step: 0.05, value: settings.alpha, change: turned("alpha") }),
          slider("gamma", text("gamma"), { min: 0.5, max: 1, step: 0.01, value: settings.gamma, change: turned("gamma") }),
          slider("epsilon", text("epsilon"), { min: 0, max: 1, step: 0.05, value: settings.epsilon, change: turned("epsilon") }),
          slider("slip", text("slip"), { min: 0, max: 0.8, step: 0.05, value: settings.slip, change: turned("slip") }),
          slider("speed", text("speed"), { min: 0, max: 3, step: 0.05, value: Math.log10(settings.speed),
            show: (x) => String(Math.round(10 ** x)), change: (x) => turned("speed")(Math.round(10 ** x)) })),
        h("div", { class: "optimum" }, h("h3", {}, text("grid_optimum")), best, quiet("grid_optimum_about"))])));
  changed();
  // The first thing to see is the thing itself, moving; what ran before the room was drawn anew runs on.
  // In a mission, you guess first.
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (!state.begun && !frame.mission && !settings.predict && !still) go.click();
  else tick();
}
