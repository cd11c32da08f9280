"use strict";
// values where the pointer is, or where the arrow keys have gone
const tip = document.getElementById("tip");
function showTip(element, text) {
  tip.textContent = text;
  tip.hidden = false;
  const at = element.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const left = Math.min(Math.max(4, at.left + at.width / 2 - own.width / 2), document.documentElement.clientWidth - own.width - 4);
  const above = at.top - own.height - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 4 ? above : Math.min(at.top + Math.min(at.height, 60) + 6, window.innerHeight - own.height - 4)}px`;
}
function hideTip() { tip.hidden = true; }
document.addEventListener("pointerover", (event) => {
  const mark = event.target.closest?.("[data-tip]");
  if (mark) showTip(mark, mark.dataset.tip);
  else hideTip();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
function stepThrough(area, items, show, leave) {
  let current = -1;
  const clear = () => { items[current]?.classList.remove("on"); current = -1; hideTip(); leave?.(); };
  area.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by || event.target !== area) return;
    event.preventDefault();
    items[current]?.classList.remove("on");
    current = Math.min(Math.max(current + by, 0), items.length - 1);
    items[current].classList.add("on");
    show(items[current]);
  });
  area.addEventListener("blur", clear);
}
for (const plot of document.querySelectorAll(".plot")) {
  const marks = [...plot.querySelectorAll(".mark")];
  if (marks.length) stepThrough(plot, marks, (mark) => showTip(mark, mark.dataset.tip));
}

// the tiles of a tensor on the torus
const layers = document.getElementById("layers");
if (layers) {
  const data = JSON.parse(document.getElementById("torus-data").textContent);
  const mesh = Object.entries(data.mesh), select = document.getElementById("tensor");
  const cells = new Map([...layers.querySelectorAll("g")].map((cell) => [Number(cell.dataset.d), cell]));
  const locations = new Map([...cells.keys()].sort((a, b) => a - b).map((device, i) => [device, data.locations[i]]));
  const coordinates = (device) => {
    const at = {};
    for (const [axis, size] of [...mesh].reverse()) { at[axis] = device % size; device = Math.floor(device / size); }
    return at;
  };
  const tileOf = (tiling, at) => Object.entries(tiling.strides).reduce((sum, [axis, stride]) => sum + stride * at[axis], 0);
  const range = (tiling, at) => Object.entries(tiling.axes).map(([axis, size], i) => {
    let index = 0, shards = 1;
    for (const name of tiling.dims[i]) { index = index * data.mesh[name] + at[name]; shards *= data.mesh[name]; }
    const part = size / shards;
    return shards === 1 ? `${axis}: all ${size}` : `${axis}: ${index * part} to ${(index + 1) * part - 1} of ${size}`;
  }).join("\n");
  const scale = data.scale;
  const colour = (part) => {
    const x = part * (scale.length - 1), i = Math.min(Math.floor(x), scale.length - 2);
    return scale[i].map((low, k) => Math.round(low + (x - i) * (scale[i + 1][k] - low)));
  };
  let numbers = new Map(), about = () => "";
  const draw = () => {
    const choice = select.value.slice(1), isTensor = select.value[0] === "t";
    const tiling = isTensor ? data.tilings[Number(choice)] : null;
    const count = isTensor ? tiling.tiles : data.mesh[choice];
    numbers = new Map([...cells.keys()].map((device) => {
      const at = coordinates(device);
      return [device, isTensor ? tileOf(tiling, at) : at[choice]];
    }));
    const total = mesh.reduce((product, [, size]) => product * size, 1);
    document.getElementById("tiling").textContent = isTensor
      ? `${tiling.spec}: ` + (count === 1 ? "replicated on all devices" : `${count} different tiles, each on ` + (count === total ? "one device" : `${total / count} of ${total} devices`))
      : `${count} coordinates on ${choice}; outlined are the devices of one group along it, which exchange data in its collectives`;
    for (const [device, cell] of cells) {
      const number = numbers.get(device), rgb = colour(count > 1 ? number / (count - 1) : 0.5);
      cell.style.setProperty("--f", `rgb(${rgb})`);
      cell.style.setProperty("--t", rgb[0] * 0.3 + rgb[1] * 0.59 + rgb[2] * 0.11 > 130 ? "#000" : "#fff");
      const text = cell.querySelector("text"), label = String(number);
      text.textContent = label.length * 7 <= Number(cell.querySelector("rect").getAttribute("width")) ? label : "";
    }
    about = (device) => {
      const at = coordinates(device), where = mesh.map(([axis]) => `${axis} ${at[axis]}`).join(", ");
      return `device ${device} (${where})\n${locations.get(device)}\n` + (isTensor ? `tile ${numbers.get(device)} of ${count}\n${range(tiling, at)}` : `${choice} ${at[choice]} of ${count}`);
    };
  };
  const isSame = (one, other) => {
    if (select.value[0] === "t") return numbers.get(one) === numbers.get(other);
    const a = coordinates(one), b = coordinates(other), axis = select.value.slice(1);
    return mesh.every(([name]) => name === axis || a[name] === b[name]);
  };
  const outline = (device) => { for (const [other, cell] of cells) cell.classList.toggle("same", device !== null && isSame(device, other)); };
  const show = (cell) => { const device = Number(cell.dataset.d); outline(device); showTip(cell, about(device)); };
  layers.addEventListener("pointerover", (event) => {
    const cell = event.target.closest("g");
    if (cell) { event.stopPropagation(); show(cell); }
  });
  layers.addEventListener("pointerleave", () => { outline(null); hideTip(); });
  stepThrough(layers, [...layers.querySelectorAll("g")], show, () => outline(null));
  select.addEventListener("change", draw);
  draw();
  // the paths of the table lead to the tiles
  for (const row of document.querySelectorAll("#parameter-table tbody tr")) {
    const button = document.createElement("button"), cell = row.cells[0];
    button.type = "button"; button.className = "path"; button.append(...cell.childNodes);
    button.title = "Show its tiles on the torus";
    button.addEventListener("click", () => {
      select.value = `t${data.tilings.findIndex((each) => each.name === button.textContent)}`;
      draw();
      document.getElementById("torus").scrollIntoView();
    });
    cell.replaceChildren(button);
  }
}

// tables sort by their columns
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button"; button.textContent = head.textContent; head.replaceChildren(button);
    button.addEventListener("click", () => {
      const isNumber = body.rows[0]?.cells[column].dataset.value !== undefined;
      // numbers begin with the largest
      const previous = head.getAttribute("aria-sort"), first = isNumber ? "descending" : "ascending";
      const order = previous === first ? (isNumber ? "ascending" : "descending") : first;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const value = (row) => isNumber ? Number(row.cells[column].dataset.value) : row.cells[column].textContent;
      const compare = (a, b) => isNumber ? value(a) - value(b) : value(a).localeCompare(value(b), "en", { numeric: true });
      body.append(...[...body.rows].sort((a, b) => sign * compare(a, b)));
    });
  });
}

document.getElementById("copy")?.addEventListener("click", async () => {
  const block = document.getElementById("trainer"), status = document.getElementById("copied");
  try {
    await navigator.clipboard.writeText(block.textContent);
    status.textContent = "copied";
  } catch {
    getSelection().selectAllChildren(block);
    status.textContent = "selected: press Ctrl+C";
  }
});
addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });
