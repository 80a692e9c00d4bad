// The frame: five rooms behind tabs, the language, the colors, and what the address asks for.

import { ROOMS, addressOf, follow, frame, readFrame, remember, watch } from "./address.js";
import { language, setLanguage, text } from "./texts.js";
import { button, h } from "./dom.js";
import { CHAPTERS, addressOfPage, missionsOf, pageLink, setOf } from "./missions.js";
import * as grid from "./grid.js";
import * as bandit from "./bandit.js";
import * as clip from "./clip.js";
import { criticTold } from "./gae.js";
import * as answers from "./answers.js";
import * as train from "./train.js";

const PARTS = { grid, bandit, clip, answers, train };
const OPEN = {
  grid: grid.gridRoom, bandit: bandit.banditRoom, clip: clip.clipRoom,
  answers: (place) => answers.answersRoom(place, train.getPool, train.ownSteps),
  train: train.trainRoom,
};
// Single pictures, for a frame in a page of the course: #figure=gae&lang=zh
const FIGURES = {
  crawl: ["grid", (place) => grid.gridRoom(place, true)],
  noise: ["bandit", (place) => bandit.banditRoom(place, true)],
  clip: ["clip", clip.clipFigure], passes: ["clip", clip.passesFigure], group: ["clip", clip.groupFigure],
  gae: ["clip", clip.gaeFigure],
};

// The numbers that missions name are computed: they are those on show.
const NUMBERS = {
  plus_ten: bandit.banditTold, samples: bandit.banditTold, small: bandit.banditTold, alone: bandit.banditTold,
  lucky: clip.passesTold, pull: clip.passesTold, critic: criticTold,
};

function showTheme() {
  if (frame.theme) document.documentElement.dataset.theme = frame.theme;
}

function header(room) {
  const names = ROOMS;
  const tabs = names.map((name, i) => h("button", {
    type: "button", role: "tab", id: `tab_${name}`, "aria-selected": String(name === room), "aria-controls": "room",
    tabindex: name === room ? 0 : -1,
    onclick: () => enter(name),
    onkeydown: ({ key }) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
      if (step) enter(names[(i + step + names.length) % names.length]);
    },
  }, `${i + 1}. ${text(`tab_${name}`)}`));
  return h("header", {},
    h("div", { class: "top" }, h("h1", {}, text("title")),
      addressOfPage("README.md") ? h("a", { href: addressOfPage("README.md"), id: "home" }, text("home")) : "",
      button(text("other_language"), () => { setLanguage(language() === "zh" ? "en" : "zh"); remember(); render(); },
        { id: "language", lang: language() === "zh" ? "en" : "zh-Hant-TW" }),
      button(text("theme"), () => {
        const dark = frame.theme ? frame.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
        frame.theme = dark ? "light" : "dark";
        showTheme();
        remember();
      }, { id: "theme" })),
    h("p", {}, text("about")),
    h("div", { role: "tablist", "aria-label": text("rooms") }, tabs));
}

function enter(room) {
  frame.mission = null;
  location.hash = addressOf(room, PARTS[room].fields, PARTS[room].settings);
}

function render() {
  const figure = FIGURES[frame.figure], room = figure ? figure[0] : frame.room;
  frame.room = room;
  document.documentElement.lang = language() === "zh" ? "zh-Hant-TW" : "en";
  document.title = text("title");
  document.body.classList.toggle("embed", frame.embed);
  showTheme();
  watch(PARTS[room].fields, PARTS[room].settings);
  remember();
  const focused = document.activeElement?.id, page = document.getElementById("page");
  const place = frame.embed ? h("div", { id: "room" }) : h("div", { role: "tabpanel", id: "room", "aria-labelledby": `tab_${room}` });
  if (frame.embed) {
    page.replaceChildren(h("main", {}, h("h1", { class: "unseen" }, text(`tab_${room}`)), place, h("p", { class: "quiet" },
      h("a", { href: addressOf(room, PARTS[room].fields, PARTS[room].settings), target: "_blank" }, text("open_playground")))));
  } else {
    page.replaceChildren(header(room),
      h("main", {}, missionsOf(room, visit, NUMBERS), place, h("p", { class: "chapters" }, text("chapters"), " ",
        CHAPTERS[room].map(([name, path], i) => [i ? text("and") : "", pageLink(name, path)]))),
      h("footer", {}, h("p", {}, text("needs")), h("p", {}, text("source"))));
  }
  (figure ? figure[1] : OPEN[room])(place);
  const again = focused?.startsWith("tab_") ? null : document.getElementById(focused); // what had the focus, if it is still there
  if (focused) (again ?? document.getElementById(`tab_${room}`))?.focus({ preventScroll: true });
}

/** What the address names is set; a room that has begun with something else makes room for it. */
function arrive() {
  const named = readFrame(), room = FIGURES[frame.figure]?.[0] ?? frame.room, { fields, settings, settled } = PARTS[room];
  const set = frame.mission && setOf(room, frame.mission);
  const changed = follow(fields, settings, named, new URLSearchParams(set ?? ""));
  if (changed || visited) settled?.();
}

let visited = false, target = null;
/** A mission's link is followed: the room begins anew, and shows the part that the mission is about. */
function visit(mission) {
  visited = true;
  target = clip.PART_OF[mission] && `${clip.PART_OF[mission]}_title`;
}
addEventListener("hashchange", () => {
  arrive();
  render();
  if (target) document.getElementById(target)?.scrollIntoView();
  visited = false;
  target = null;
});

arrive();
render();
train.loaded.then(() => { if (frame.room === "train" && !train.training.running) render(); });
// A page that shows this one in a frame can give it the height it needs.
if (frame.embed && parent !== window) {
  new ResizeObserver(() => parent.postMessage({ playground: document.documentElement.scrollHeight }, "*")).observe(document.body);
}
