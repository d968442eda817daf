"use strict";
// Everything from a record is put into the page as text, never as markup.
const byId = (id) => document.getElementById(id);
const graph = JSON.parse(byId("graph").textContent);
let records = null;
let chosen = -1;
const picture = byId("picture");

const before = graph.nodes.map(() => []);
const after = graph.nodes.map(() => []);
graph.edges.forEach(([source, target, label]) => {
  before[target].push([source, graph.labels[label]]);
  after[source].push([target, graph.labels[label]]);
});
const cells = new Map(graph.nodes.map((node, index) => [node.at.join(), index]));
const shapeOf = (index) => byId("n" + index);

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function indented(text) {
  // By hand: JSON.parse would round integers above 2^53.
  let out = "", depth = 0, inside = false;
  const line = () => "\n" + "  ".repeat(depth);
  for (let at = 0; at < text.length; at++) {
    const letter = text[at];
    if (inside) {
      out += letter;
      if (letter === "\\") out += text[++at];
      else if (letter === '"') inside = false;
    } else if (letter === '"') { inside = true; out += letter; }
    else if ("{[".includes(letter)) {
      if ("}]".includes(text[at + 1])) { out += letter + text[++at]; }
      else { depth++; out += letter + line(); }
    } else if ("}]".includes(letter)) { depth--; out += line() + letter; }
    else if (letter === ",") out += letter + line();
    else if (letter === ":") out += ": ";
    else if (!" \n\t\r".includes(letter)) out += letter;
  }
  return out;
}

function way(title, steps) {
  const box = document.createDocumentFragment();
  if (!steps.length) return box;
  box.append(element("h3", title));
  const list = element("ul");
  steps.slice(0, 200).forEach(([index, label]) => {
    const item = element("li");
    const button = element("button", graph.nodes[index].title, "link");
    button.type = "button";
    button.addEventListener("click", () => choose(index, true));
    item.append(button, element("span", "  " + label, "muted"));
    list.append(item);
  });
  if (steps.length > 200) list.append(element("li", `and ${steps.length - 200} more`, "muted"));
  box.append(list);
  return box;
}

function facts(node) {
  const table = element("table");
  node.facts.forEach(([name, value]) => {
    const row = element("tr");
    row.append(element("td", name, "key"), element("td", value, "digest"));
    table.append(row);
  });
  return table;
}

function papers(node) {
  const box = element("div");
  if (node.records.length) box.append(element("h3", "Signed records behind it"));
  records = records || JSON.parse(byId("records").textContent);
  node.records.slice(0, 50).forEach((number) => {
    const [digest, payload] = records[number];
    box.append(element("div", digest, "digest muted"));
    const text = element("pre", indented(payload));
    text.tabIndex = 0;
    box.append(text);
  });
  return box;
}

function choose(index, focus) {
  if (chosen >= 0) {
    shapeOf(chosen).classList.remove("chosen");
    shapeOf(chosen).setAttribute("tabindex", "-1");
    document.querySelectorAll(".near").forEach((each) => each.classList.remove("near"));
  }
  chosen = index;
  const node = graph.nodes[index];
  const shape = shapeOf(index);
  shape.classList.add("chosen");
  shape.setAttribute("tabindex", "0");
  [...before[index], ...after[index]].forEach(([near]) => shapeOf(near).classList.add("near"));
  if (focus) shape.focus({ preventScroll: true });
  if (focus || node.faulty) reveal(shape);
  const left = element("div");
  left.append(
    element("h3", node.title), facts(node), way("Comes from", before[index]),
    way("Leads to", after[index]),
  );
  byId("details").replaceChildren(left, papers(node));
}

function reveal(shape) {
  // Scrolls the picture alone, and only if the shape is not in sight.
  const inner = shape.getBoundingClientRect(), outer = picture.getBoundingClientRect();
  if (inner.left < outer.left || inner.right > outer.right) {
    picture.scrollLeft += inner.left - outer.left - outer.width / 2;
  }
  if (inner.top < outer.top || inner.bottom > outer.bottom) {
    picture.scrollTop += inner.top - outer.top - outer.height / 2;
  }
}

const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function neighbour(index, [right, down]) {
  // The nearest node in that direction: straight ones first.
  const [x, y] = graph.nodes[index].at;
  const beside = cells.get([x + right, y + down].join());
  if (beside !== undefined) return beside;
  let best = index, least = Infinity;
  graph.nodes.forEach((node, other) => {
    const dx = node.at[0] - x, dy = node.at[1] - y;
    const ahead = dx * right + dy * down, aside = Math.abs(dx * down) + Math.abs(dy * right);
    if (ahead > 0 && ahead + 4 * aside < least) { least = ahead + 4 * aside; best = other; }
  });
  return best;
}

function nextFault(from, step) {
  const count = graph.nodes.length;
  for (let moved = 1; moved <= count; moved++) {
    const index = (from + step * moved + count * 2) % count;
    if (graph.nodes[index].faulty) return index;
  }
  return from;
}

const numberOf = (target) => {
  const shape = target.closest(".node");
  return shape ? Number(shape.id.slice(1)) : -1;
};
picture.addEventListener("click", (event) => {
  const index = numberOf(event.target);
  if (index >= 0) choose(index, true);
});
picture.addEventListener("keydown", (event) => {
  const index = numberOf(event.target);
  if (index < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key in STEPS) choose(neighbour(index, STEPS[event.key]), true);
  else if (event.key === "n") choose(nextFault(index, 1), true);
  else if (event.key === "p") choose(nextFault(index, -1), true);
  else if (event.key === "Enter" || event.key === " ") byId("details").focus();
  else return;
  event.preventDefault();
});
document.querySelectorAll("[data-node]").forEach((link) => {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    choose(Number(link.dataset.node), true);
    picture.scrollIntoView({ block: "nearest" });
  });
});
if (graph.nodes.length) choose(Math.max(0, graph.nodes.findIndex((node) => node.faulty)), false);
document.body.offsetHeight; // lays the page out, so that the time includes it
document.documentElement.dataset.opened = String(Math.round(performance.now()));
