// Pictures in the colors of the page, films with a button and a slider, names beside the fields of the glossary.
const isDark = () => document.body.dataset.mdColorScheme === "slate";
const inColours = [];
const chinese = document.documentElement.lang.startsWith("zh");

// Rooms of the playground take the page's colors, and say how high they are.
const rooms = [...document.querySelectorAll(".room")];
inColours.push(() => rooms.forEach((room) => { room.src = `${room.dataset.src}&theme=${isDark() ? "dark" : "light"}`; }));
addEventListener("message", ({ data, source }) => {
  const room = rooms.find((one) => one.contentWindow === source);
  if (room && data.playground) room.style.height = `${data.playground}px`;
});

for (const film of document.querySelectorAll(".film")) {
  const still = film.querySelector("img"), button = document.createElement("button");
  const slider = document.createElement("input"), controls = document.createElement("div");
  const { count, ms } = film.dataset;
  let timer = 0;
  const show = () => { still.src = `${film.dataset.src}.frames/${slider.value}.webp`; };
  const play = (on) => {
    clearInterval(timer);
    timer = on && setInterval(() => { slider.value = (Number(slider.value) + 1) % count; show(); }, ms);
    button.textContent = on ? "⏸" : "▶";
    button.setAttribute("aria-label", chinese ? (on ? "暫停" : "播放") : on ? "Pause" : "Play");
  };
  Object.assign(slider, { type: "range", min: 0, max: count - 1, value: count - 1 });
  slider.setAttribute("aria-label", chinese ? "影格" : "Frame");
  slider.addEventListener("input", () => { play(false); show(); });
  button.addEventListener("click", () => play(!timer));
  controls.append(button, slider);
  film.append(controls);
  play(false);
}

for (const table of document.querySelectorAll(".glossary table"))
  for (const cell of table.querySelectorAll("td:nth-child(n + 2)"))
    cell.dataset.label = table.querySelectorAll("th")[cell.cellIndex].textContent;

// What the theme leaves without a name, and what scrolls sideways without a place among the stops of the Tab key.
document.querySelector(".md-search").ariaLabel = document.querySelector(".md-search__input").ariaLabel;
for (const nav of document.querySelectorAll(".md-nav[aria-labelledby]")) {
  nav.ariaLabel = nav.parentElement.querySelector(".md-nav__link").textContent.trim();
  nav.removeAttribute("aria-labelledby");
}
const reach = () => document.querySelectorAll(".md-typeset__scrollwrap, .formula, .md-typeset pre > code").forEach((box) => {
  if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
});
addEventListener("load", () => document.querySelectorAll(".md-code__nav").forEach((nav) => { nav.role = "none"; }));
addEventListener("load", reach);
addEventListener("resize", reach);

const paint = () => inColours.forEach((change) => change());
new MutationObserver(paint).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
paint();
