"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // Theme: what the system says, until a choice is made.
  const theme = document.getElementById("theme");
  const themes = ["system", "light", "dark"];
  let chosen = "system";
  try { chosen = localStorage.getItem("chiku-theme") || "system"; } catch { /* a page without storage starts anew */ }
  const dress = () => {
    if (chosen === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    theme.textContent = `Theme: ${chosen}`;
  };
  theme.hidden = false;
  theme.addEventListener("click", () => {
    chosen = themes[(themes.indexOf(chosen) + 1) % themes.length];
    try { localStorage.setItem("chiku-theme", chosen); } catch { /* it holds until the page is closed */ }
    dress();
  });
  if (!themes.includes(chosen)) chosen = "system";
  dress();

  // Tooltips: the lines of a mark's name, by pointer or focus.
  const tip = document.getElementById("tip");
  let shownFor = null;
  const light = (mark, on) => {
    const id = mark.dataset.id;
    if (id === undefined) return;
    for (const edge of all(".edge", mark.ownerSVGElement))
      if (edge.dataset.from === id || edge.dataset.to === id) edge.classList.toggle("on", on);
  };
  const hide = () => {
    if (shownFor) light(shownFor, false);
    shownFor = null;
    tip.hidden = true;
  };
  const stand = (mark) => {
    const at = mark.getBoundingClientRect();
    const box = tip.getBoundingClientRect();
    const x = Math.min(Math.max(8, at.left + at.width / 2 - box.width / 2), innerWidth - box.width - 8);
    const above = at.top - box.height - 10;
    tip.style.left = `${x}px`;
    tip.style.top = `${above > 4 ? above : at.bottom + 10}px`;
  };
  const show = (mark) => {
    hide();
    shownFor = mark;
    light(mark, true);
    tip.replaceChildren(...mark.getAttribute("aria-label").split("\n").map((line) => {
      const div = document.createElement("div");
      div.textContent = line;
      return div;
    }));
    tip.hidden = false;
    stand(mark);
  };
  for (const kind of ["pointerover", "focusin"])
    document.addEventListener(kind, (e) => {
      const mark = e.target.closest?.(".mark");
      if (mark) show(mark);
      else if (kind === "pointerover") hide();
    });
  document.addEventListener("focusout", hide);
  // A mark that has the focus keeps its tooltip: taking the focus may itself scroll.
  const scrolled = () => (shownFor && shownFor === document.activeElement ? stand(shownFor) : hide());
  document.addEventListener("scroll", scrolled, { passive: true, capture: true });

  // Keys inside a plot: arrows go to the next mark that is shown.
  document.addEventListener("keydown", (e) => {
    if (e.key === "Escape") return hide();
    const svg = e.target.closest?.("svg.plot");
    if (!svg || e.shiftKey || e.ctrlKey || e.altKey || e.metaKey) return;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key];
    const marks = all(".mark:not(.off):not(.out)", svg);
    const end = { Home: 0, End: marks.length - 1 }[e.key];
    if ((step === undefined && end === undefined) || !marks.length) return;
    e.preventDefault();
    const here = marks.indexOf(e.target.closest(".mark"));
    const next = marks[end ?? (here < 0 ? 0 : (here + step + marks.length) % marks.length)];
    for (const mark of all('.mark[tabindex="0"]', svg)) mark.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });

  // Filter: a text in a mark's name or a row, and the states that are ticked.
  const filter = (figure) => {
    const text = (figure.querySelector(".filter")?.value ?? "").trim().toLowerCase();
    const states = new Set(all(".state:checked", figure).map((box) => box.value));
    const chosen = (state, said) =>
      (!state || !figure.querySelector(".state") || states.has(state)) && said.toLowerCase().includes(text);
    const marks = all(".mark", figure);
    const off = new Set();
    let shown = 0;
    for (const mark of marks) {
      const keep = chosen(mark.dataset.state ?? [...states, ...["valid", "invalid", "pending"]].find((s) => mark.classList.contains(s)),
        mark.getAttribute("aria-label"));
      mark.classList.toggle("off", !keep);
      if (keep) shown += 1;
      else if (mark.dataset.id !== undefined) off.add(mark.dataset.id);
    }
    for (const edge of all(".edge[data-from]", figure))
      edge.classList.toggle("off", off.has(edge.dataset.from) || off.has(edge.dataset.to));
    for (const label of all(".label", figure)) label.classList.toggle("off", off.has(label.dataset.of));
    for (const row of all("tbody tr", figure)) row.hidden = !chosen(row.dataset.state, row.textContent);
    const kept = marks.filter((m) => !m.classList.contains("off"));
    if (kept.length && !kept.some((m) => m.getAttribute("tabindex") === "0")) kept[0].setAttribute("tabindex", "0");
    const count = figure.querySelector(".count");
    if (count) count.textContent = shown === marks.length ? `${shown} shown` : `${shown} of ${marks.length} shown`;
  };

  // Zoom: the scales get another domain; marks, labels, lines and ticks follow.
  const pair = (text) => text.split(" ").map(Number);
  const spell = (v, step) => v.toFixed(Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9))));
  const ticks = (low, high, about) => {
    const raw = (high - low) / about;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw);
    const out = [];
    for (let i = Math.ceil(low / step); i * step <= high; i += 1) out.push(i * step);
    return out.map((v) => [v, spell(v, step % power ? step / 10 : step)]);
  };
  const svgElement = (name, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const zoomable = (figure, svg) => {
    const full = { x: pair(svg.dataset.xDomain), y: pair(svg.dataset.yDomain) };
    const range = { x: pair(svg.dataset.xRange), y: pair(svg.dataset.yRange) };
    const still = { x: svg.querySelector(".axis.x")?.innerHTML, y: svg.querySelector(".axis.y")?.innerHTML };
    // What moves, as it was drawn: the way back is exact.
    const moves = ["transform", "x1", "y1", "x2", "y2"];
    const drawn = all(".mark, .label, .edge[data-from], .vline", svg)
      .map((e) => [e, moves.map((name) => [name, e.getAttribute(name)]).filter(([name, v]) => v !== null || name === "transform")]);
    let view = { x: [...full.x], y: [...full.y] };
    // A mark that leaves the view while it has the focus hands it to the plot, so that keys still work.
    svg.setAttribute("tabindex", "-1");
    const at = (axis, v) =>
      range[axis][0] + ((v - view[axis][0]) / (view[axis][1] - view[axis][0])) * (range[axis][1] - range[axis][0]);
    const inside = (axis, v) => v >= view[axis][0] && v <= view[axis][1];
    const fixed = new Map(all(".mark", svg).filter((m) => m.dataset.x === undefined)
      .map((m) => [m, m.transform.baseVal[0].matrix.e]));
    const draw = () => {
      const zoomed = ["x", "y"].some((a) => view[a].some((v, i) => v !== full[a][i]));
      const places = new Map();
      const held = document.activeElement;
      for (const mark of all(".mark", svg)) {
        const own = mark.dataset.x !== undefined;
        const x = own ? at("x", Number(mark.dataset.x)) : fixed.get(mark);
        const y = at("y", Number(mark.dataset.y));
        const out = !inside("y", Number(mark.dataset.y)) || (own && !inside("x", Number(mark.dataset.x)));
        mark.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
        if (out && mark === held) svg.focus({ preventScroll: true });
        mark.classList.toggle("out", out);
        places.set(mark.dataset.id, { x, y, out });
      }
      for (const label of all(".label", svg)) {
        const p = places.get(label.dataset.of);
        label.setAttribute("transform", `translate(${p.x.toFixed(1)} ${p.y.toFixed(1)})`);
        label.classList.toggle("out", p.out);
      }
      for (const edge of all(".edge[data-from]", svg)) {
        const [a, b] = [places.get(edge.dataset.from), places.get(edge.dataset.to)];
        for (const [key, v] of [["x1", a.x], ["y1", a.y], ["x2", b.x], ["y2", b.y]]) edge.setAttribute(key, v.toFixed(1));
        edge.classList.toggle("out", a.out || b.out);
      }
      for (const line of all(".vline", svg)) {
        const v = Number(line.dataset.x);
        const [old] = [Number(line.querySelector("line").getAttribute("x1"))];
        line.setAttribute("transform", `translate(${(at("x", v) - old).toFixed(1)} 0)`);
        line.classList.toggle("out", !inside("x", v));
      }
      for (const axis of ["x", "y"]) {
        const group = svg.querySelector(`.axis.${axis}`);
        if (!group) continue;
        if (!zoomed) { group.innerHTML = still[axis]; continue; }
        group.replaceChildren(...ticks(...view[axis], 6).flatMap(([v, text]) => {
          const p = at(axis, v).toFixed(1);
          const [bottom] = range.y;
          const [left, right] = range.x;
          return axis === "x"
            ? [svgElement("line", { class: "stub", x1: p, x2: p, y1: bottom, y2: bottom + 5 }),
              svgElement("text", { class: "tick", x: p, y: bottom + 18, "text-anchor": "middle" }, text)]
            : [svgElement("line", { class: "grid", x1: left, x2: right, y1: p, y2: p }),
              svgElement("text", { class: "tick", x: left - 8, y: Number(p) + 4, "text-anchor": "end" }, text)];
        }));
      }
      if (!zoomed)
        for (const [e, attributes] of drawn)
          for (const [name, v] of attributes) v === null ? e.removeAttribute(name) : e.setAttribute(name, v);
      svg.classList.toggle("zoomed", zoomed);
      hide();
    };
    const clamp = (axis) => {
      const size = Math.min(view[axis][1] - view[axis][0], full[axis][1] - full[axis][0]);
      const low = Math.min(Math.max(view[axis][0], full[axis][0]), full[axis][1] - size);
      view[axis] = size >= full[axis][1] - full[axis][0] ? [...full[axis]] : [low, low + size];
    };
    const zoom = (by, around = { x: 0.5, y: 0.5 }) => {
      if (!by) view = { x: [...full.x], y: [...full.y] };
      else for (const axis of ["x", "y"]) {
        const size = view[axis][1] - view[axis][0];
        const next = Math.max(size / by, (full[axis][1] - full[axis][0]) / 200);
        const pivot = view[axis][0] + size * around[axis];
        view[axis] = [pivot - next * around[axis], pivot + next * (1 - around[axis])];
        clamp(axis);
      }
      draw();
    };
    const move = (axis, share) => {
      const by = (view[axis][1] - view[axis][0]) * share;
      view[axis] = view[axis].map((v) => v + by);
      clamp(axis);
      draw();
    };
    const spot = (e) => {
      const p = new DOMPoint(e.clientX, e.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const share = (axis, v) => Math.min(1, Math.max(0, (v - range[axis][0]) / (range[axis][1] - range[axis][0])));
      return { x: share("x", p.x), y: share("y", p.y) };
    };
    for (const button of all("[data-zoom-by]", figure))
      button.addEventListener("click", () => zoom(Number(button.dataset.zoomBy)));
    svg.addEventListener("dblclick", (e) => { e.preventDefault(); zoom(2, spot(e)); });
    // The wheel alone scrolls the page.
    svg.addEventListener("wheel", (e) => {
      if (!e.ctrlKey && !e.metaKey) return;
      e.preventDefault();
      zoom(e.deltaY < 0 ? 1.25 : 0.8, spot(e));
    }, { passive: false });
    const spotOf = (mark) => {
      const r = mark.getBoundingClientRect();
      return spot({ clientX: r.left + r.width / 2, clientY: r.top + r.height / 2 });
    };
    let grip = null;
    svg.addEventListener("pointerdown", (e) => {
      if (svg.classList.contains("zoomed") && e.pointerType === "mouse") { grip = spot(e); svg.setPointerCapture(e.pointerId); }
    });
    svg.addEventListener("pointermove", (e) => {
      if (!grip) return;
      const now = spot(e);
      move("x", grip.x - now.x);
      move("y", grip.y - now.y);
      grip = now;
    });
    for (const kind of ["pointerup", "pointercancel"]) svg.addEventListener(kind, () => { grip = null; });
    svg.addEventListener("keydown", (e) => {
      const by = { "+": 1.5, "=": 1.5, "-": 1 / 1.5, 0: 0 }[e.key];
      const way = { ArrowRight: ["x", 0.2], ArrowLeft: ["x", -0.2], ArrowUp: ["y", 0.2], ArrowDown: ["y", -0.2] }[e.key];
      const mark = e.target.closest(".mark");
      if (by !== undefined && !e.ctrlKey && !e.metaKey) { e.preventDefault(); zoom(by, mark ? spotOf(mark) : undefined); }
      else if (way && e.shiftKey) { e.preventDefault(); move(...way); }
    });
  };

  for (const figure of all("figure")) {
    const controls = figure.querySelector(".controls");
    if (!controls) continue;
    controls.hidden = false;
    controls.addEventListener("input", () => filter(figure));
    filter(figure);
    const svg = figure.querySelector("svg[data-zoom]");
    if (svg) zoomable(figure, svg);
  }
})();
