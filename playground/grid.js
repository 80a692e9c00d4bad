// Room 1: Q-learning on the grid of chapter 1, with slippery ground and walls.

import { text } from "./texts.js";
import { button, formula, h, number, quiet, signed, slider, svg } from "./dom.js";

const SIDE = 4, GOAL = SIDE * SIDE - 1, LIMIT = 100; // moves of an episode
const MOVES = [[-1, 0], [1, 0], [0, -1], [0, 1]]; // (rows, columns): up, down, left, right
const SIDEWAYS = [[2, 3], [2, 3], [0, 1], [0, 1]];
const CORNERS = ["50,50 0,0 100,0", "50,50 0,100 100,100", "50,50 0,0 0,100", "50,50 100,0 100,100"];
const PLACES = [[50, 15], [50, 85], [20, 50], [80, 50]]; // of the four numbers in a cell

export const settings = { alpha: 0.5, gamma: 0.99, epsilon: 0.5, slip: 0, speed: 6, predict: false };
export const world = { walls: new Set() };
const state = {};

/** Where a move in one direction leads: a wall, or the edge, keeps the agent where it is. */
function landing(cell, action) {
  const row = Math.floor(cell / SIDE) + MOVES[action][0], column = (cell % SIDE) + MOVES[action][1];
  const next = row * SIDE + column;
  const free = row >= 0 && row < SIDE && column >= 0 && column < SIDE && !world.walls.has(next);
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

/** Bellman's optimality equation (Sutton & Barto, eq. 3.20), swept until nothing changes: q* [16][4]. */
export function optimum(gamma, slip) {
  const q = Array.from({ length: GOAL + 1 }, () => [0, 0, 0, 0]);
  for (let change = 1, sweep = 0; change > 1e-9 && sweep < 5000; sweep++) {
    change = 0;
    for (let cell = 0; cell < GOAL; cell++) {
      for (let action = 0; action < 4; action++) {
        const value = outcomes(cell, action, slip).reduce((sum, [p, next]) =>
          sum + p * (rewardOf(next) + (next === GOAL ? 0 : gamma * Math.max(...q[next]))), 0);
        change = Math.max(change, Math.abs(value - q[cell][action]));
        q[cell][action] = value;
      }
    }
  }
  return q;
}

export function reset() {
  Object.assign(state, {
    Q: Array.from({ length: GOAL + 1 }, () => [0, 0, 0, 0]), at: 0, moves: 0, episodes: 0, inEpisode: 0, last: null,
    lengths: [], asked: null, guesses: [0, 0],
  });
}
reset();

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

function cellPicture(cell, q, limit) {
  if (cell === GOAL) return svg("svg", { viewBox: "0 0 100 100" }, svg("text", { x: 50, y: 50, class: "big" }, "+100"));
  if (world.walls.has(cell)) return svg("svg", { viewBox: "0 0 100 100" }, svg("rect", { width: 100, height: 100, class: "wall" }));
  const best = Math.max(...q[cell]), { last } = state;
  return svg("svg", { viewBox: "0 0 100 100" },
    CORNERS.map((points, action) => {
      const value = q[cell][action], moved = q === state.Q && last && last.at === cell && last.action === action;
      return svg("polygon", {
        points, class: `${value > 0 ? "positive" : value < 0 ? "negative" : ""}${moved ? " moved" : ""}`,
        "fill-opacity": Math.min(0.6, Math.abs(value) / limit),
      });
    }),
    PLACES.map(([x, y], action) => svg("text", { x, y, class: q[cell][action] === best && best !== 0 ? "best" : "" },
      number(q[cell][action], Math.abs(q[cell][action]) < 99.95 ? 1 : 0))),
    q === state.Q && cell === state.at ? svg("circle", { cx: 50, cy: 50, r: 13, class: "agent" }) : null);
}

export function gridRoom(place) {
  const board = h("div", { class: "board", id: "board" }), best = h("div", { class: "board", "aria-hidden": "true" });
  const sum = h("div", { id: "grid_formula", "aria-live": "polite" }), told = h("p", { id: "grid_told" });
  const guess = h("div", { class: "controls", id: "guess" });
  const go = button("", () => { running = !running; if (running) tick(); show(); }, { class: "main", id: "grid_run" });
  const one = button(text("grid_step"), () => { running = false; if (!state.asked) move(); show(); }, { id: "grid_step" });
  let running = false, target;

  const cells = Array.from({ length: GOAL + 1 }, (_, cell) => h("button", {
    type: "button", onclick: () => {
      if (cell === 0 || cell === GOAL) return;
      world.walls.has(cell) ? world.walls.delete(cell) : world.walls.add(cell);
      if (state.at === cell) state.at = 0;
      state.last = state.asked = null;
      changed();
    },
  }));
  board.append(...cells);

  function changed() {
    target = optimum(settings.gamma, settings.slip);
    best.replaceChildren(...target.map((_, cell) => h("div", {}, cellPicture(cell, target, 100))));
    show();
  }

  function show() {
    const { Q, last, asked } = state;
    cells.forEach((element, cell) => {
      element.replaceChildren(cellPicture(cell, Q, 100));
      const kind = cell === GOAL ? "grid_goal" : world.walls.has(cell) ? "grid_wall" : "grid_cell";
      element.setAttribute("aria-label", text(kind, { cell, best: number(Math.max(...Q[cell])) }));
    });
    go.textContent = text(running ? "pause" : "grid_run");
    one.disabled = Boolean(asked);
    const away = Math.max(...Q.map((row, cell) =>
      world.walls.has(cell) || cell === GOAL ? 0 : Math.max(...row.map((value, a) => Math.abs(value - target[cell][a])))));
    told.textContent = text("grid_told", {
      moves: state.moves, episodes: state.episodes, last: state.lengths.at(-1) ?? "–", away: number(away),
    });
    guess.replaceChildren();
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
      guess.append(h("span", {}, text("grid_ask")), ...asked.map((value) => button(number(value), () => {
        state.guesses[1] += 1;
        if (value === last.after) state.guesses[0] += 1;
        learn();
        show();
        guess.append(h("strong", { class: value === last.after ? "good" : "bad" },
          text(value === last.after ? "grid_yes" : "grid_no", { value: number(last.after), right: state.guesses[0], all: state.guesses[1] })));
      })));
    }
  }

  let before = 0, owed = 0;
  function tick(now = performance.now()) {
    if (!running || !board.isConnected) return;
    owed += Math.min(0.1, (now - before) / 1000) * settings.speed; // a tab in the background owes no moves
    before = now;
    const moves = Math.floor(owed);
    owed -= moves;
    for (let i = 0; i < moves && running; i++) {
      move();
      if (state.asked) running = false;
    }
    if (moves) show();
    requestAnimationFrame(tick);
  }

  place.append(
    h("h2", {}, text("grid_title")), h("p", {}, text("grid_about")),
    h("div", { class: "controls" }, go, one,
      button(text("grid_hundred"), () => { const { predict } = settings; settings.predict = false;
        if (state.asked) learn();
        for (const end = state.episodes + 100; state.episodes < end;) move();
        settings.predict = predict; show(); }, { id: "grid_hundred" }),
      button(text("reset"), () => { reset(); show(); }, { id: "grid_reset" }),
      h("label", {}, h("input", { type: "checkbox", id: "predict", checked: settings.predict,
        onchange: ({ target: box }) => { settings.predict = box.checked; if (state.asked) { learn(); show(); } } }), " ", text("grid_predict"))),
    h("div", { class: "worlds" },
      h("div", {}, board, quiet("grid_click")),
      h("div", {}, sum, guess, told,
        h("div", { class: "sliders" },
          slider("alpha", text("alpha"), { min: 0.05, max: 1, step: 0.05, value: settings.alpha, change: (x) => { settings.alpha = x; } }),
          slider("gamma", text("gamma"), { min: 0.5, max: 1, step: 0.01, value: settings.gamma, change: (x) => { settings.gamma = x; changed(); } }),
          slider("epsilon", text("epsilon"), { min: 0, max: 1, step: 0.05, value: settings.epsilon, change: (x) => { settings.epsilon = x; } }),
          slider("slip", text("slip"), { min: 0, max: 0.8, step: 0.05, value: settings.slip, change: (x) => { settings.slip = x; changed(); } }),
          slider("speed", text("speed"), { min: 0, max: 3, step: 0.05, value: Math.log10(settings.speed),
            show: (x) => String(Math.round(10 ** x)), change: (x) => { settings.speed = 10 ** x; } })),
        h("div", { class: "optimum" }, h("h3", {}, text("grid_optimum")), best, quiet("grid_optimum_about")))));
  changed();
  // The first thing to see is the thing itself, moving.
  if (state.moves === 0 && !matchMedia("(prefers-reduced-motion: reduce)").matches) go.click();
}
