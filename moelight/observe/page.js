// Draws the tasks in #trace: an overview of all passes, and a Gantt chart that zooms and moves. Text only ever reaches
// the page through textContent and fillText.
(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("trace").textContent);
  const gantt = document.getElementById("gantt"), overview = document.getElementById("overview");
  const tip = document.getElementById("tip"), chooser = document.getElementById("pass");
  const LABEL = 132, AXIS = 24, ROW = 38, STRIP = 9, end = data.end, lanes = data.lanes;
  const shown = data.passes.filter((pass) => pass.shown);
  const rows = lanes.map(() => []);
  data.bars.lane.forEach((lane, i) => rows[lane].push(i));
  const bars = data.bars;
  let view = { from: 0, to: end }, hover = -1, colours = {};

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function readColours() {
    for (const name of ["ink", "soft", "faint", "line", "paper", "band", "measured", "mark"]) colours[name] = style("--" + name);
  }

  function seconds(us) {
    const size = Math.abs(us);
    if (size >= 6e8) return (us / 6e7).toFixed(1) + " min";
    if (size >= 1e6) return digits(us / 1e6) + " s";
    if (size >= 1e3) return digits(us / 1e3) + " ms";
    return digits(us) + " µs";
  }
  function digits(value) {
    const size = Math.abs(value);
    return value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
  }
  // A moment on the axis, with as many decimals as tell it from one `step` later.
  function moment(us, step) {
    const [unit, one] = end >= 1e6 ? [" s", 1e6] : end >= 1e3 ? [" ms", 1e3] : [" µs", 1];
    return (us / one).toFixed(Math.max(0, Math.ceil(Math.log10(one / step) - 1e-9))) + unit;
  }
  function size(bytes) {
    for (const [name, unit] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (bytes >= unit) return (bytes / unit).toFixed(1) + " " + name;
    }
    return bytes + " B";
  }

  function surface(canvas, height) {
    const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.textBaseline = "middle";
    return [pen, width];
  }
  const font = (size, weight) => (weight || 400) + " " + size + "px " + getComputedStyle(document.body).fontFamily;

  // The first bar of a row that ends after `time`; bars of a row follow one another.
  function firstAfter(row, time) {
    let low = 0, high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (bars.start[row[middle]] + bars.length[row[middle]] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }

  function ticks(from, to, room) {
    const rough = (to - from) / Math.max(2, room / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const found = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push([at, moment(at, step)]);
    return found;
  }

  function drawGantt() {
    const height = AXIS + lanes.length * ROW + 8;
    const [pen, width] = surface(gantt, height), room = width - LABEL - 8;
    const x = (time) => LABEL + ((time - view.from) / (view.to - view.from)) * room;
    pen.font = font(11.5);
    pen.textAlign = "center";
    for (const [at, words] of ticks(view.from, view.to, room)) {
      pen.fillStyle = colours.line;
      pen.fillRect(x(at), AXIS - 4, 1, height - AXIS - 4);
      pen.fillStyle = colours.soft;
      if (x(at) < width - 30) pen.fillText(words, x(at), 10);
    }
    lanes.forEach((lane, n) => drawRow(pen, n, x, room, width));
    drawPasses(pen, x, width, height);
    pen.textAlign = "left";
  }

  function drawRow(pen, n, x, room, width) {
    const top = AXIS + n * ROW + 4, tall = ROW - 10, row = rows[n];
    let busy = 0, column = -1, covered = 0;
    // Bars thinner than a pixel share one: it is painted as strongly as they fill it.
    const thin = (left, wide, colour) => {
      if (Math.floor(left) !== column) { column = Math.floor(left); covered = 0; }
      covered = Math.min(1, covered + wide);
      pen.clearRect(column, top, 1, tall);
      pen.fillStyle = colours.band;
      pen.fillRect(column, top, 1, tall);
      pen.globalAlpha = Math.max(covered, .3);
      pen.fillStyle = colour;
      pen.fillRect(column, top, 1, tall);
      pen.globalAlpha = 1;
    };
    pen.fillStyle = colours.band;
    pen.fillRect(LABEL, top, room, tall);
    pen.textAlign = "left";
    for (let k = firstAfter(row, view.from); k < row.length && bars.start[row[k]] < view.to; k++) {
      const i = row[k], from = Math.max(view.from, bars.start[i]), to = Math.min(view.to, bars.start[i] + bars.length[i]);
      busy += Math.max(0, to - from);
      const left = x(from), wide = x(to) - left, colour = data.kinds[bars.kind[i]].colour;
      if (wide < 1) { thin(left, wide, colour); continue; }
      pen.fillStyle = colour;
      pen.globalAlpha = i === hover ? .65 : 1;
      pen.fillRect(left, top, wide > 3 ? wide - .7 : wide, tall);
      pen.globalAlpha = 1;
      if (wide > 34) label(pen, i, left, wide, top + tall / 2);
    }
    pen.clearRect(0, top, LABEL - 4, tall);
    pen.fillStyle = colours.ink;
    pen.font = font(13, 600);
    pen.fillText(lanes[n], 2, top + tall / 2);
    pen.font = font(12);
    pen.fillStyle = colours.soft;
    pen.textAlign = "right";
    const held = loaded(view.from, view.to);
    pen.fillText(held > 0 ? Math.round((100 * busy) / held) + " %" : "", LABEL - 12, top + tall / 2);
  }

  // Microseconds of the view that lie in passes this page holds.
  function loaded(from, to) {
    if (shown.length === data.numPasses) return to - from;
    return shown.reduce((sum, pass) => sum + Math.max(0, Math.min(to, pass.end) - Math.max(from, pass.start)), 0);
  }

  function label(pen, i, left, wide, middle) {
    const part = bars.expert[i] >= 0 ? ":e" + bars.expert[i] : bars.batch[i] >= 0 ? "," + bars.batch[i] : "";
    const where = bars.layer[i] + part;
    const name = data.kinds[bars.kind[i]].name;
    pen.font = font(11);
    const text = [name + " " + where, where].find((words) => pen.measureText(words).width < wide - 8);
    if (!text) return;
    pen.fillStyle = data.kinds[bars.kind[i]].dark ? "#fff" : "#10151c";
    pen.fillText(text, left + 4, middle);
  }

  function drawPasses(pen, x, width, height) {
    pen.textAlign = "left";
    pen.font = font(11.5);
    for (const pass of data.passes) {
      if (pass.end <= view.from || pass.start >= view.to) continue;
      const left = Math.max(LABEL, x(pass.start)), right = Math.min(width - 8, x(pass.end));
      if (!pass.shown) {
        pen.fillStyle = colours.paper;
        pen.globalAlpha = .6;
        pen.fillRect(left, AXIS, right - left, height - AXIS - 6);
        pen.globalAlpha = 1;
        pen.fillStyle = colours.faint;
        const words = "pass " + pass.name + ": not in this page";
        if (right - left > pen.measureText(words).width + 12) pen.fillText(words, left + 6, AXIS + 14);
      }
      if (pass.start > view.from && right - left > 10) {
        pen.fillStyle = colours.mark;
        pen.fillRect(left, AXIS - 4, 1, height - AXIS - 2);
      }
    }
  }

  function drawOverview() {
    const height = lanes.length * STRIP + 8, [pen, width] = surface(overview, height), room = width - LABEL - 8;
    const x = (time) => LABEL + (time / end) * room;
    for (const pass of data.passes) {
      pass.shares.forEach((share, n) => {
        pen.fillStyle = colours.band;
        pen.fillRect(x(pass.start), 3 + n * STRIP, x(pass.end) - x(pass.start) + .5, STRIP - 1.5);
        pen.globalAlpha = Math.min(1, share);
        pen.fillStyle = colours.measured;
        pen.fillRect(x(pass.start), 3 + n * STRIP, Math.max(x(pass.end) - x(pass.start) - .4, .6), STRIP - 1.5);
        pen.globalAlpha = 1;
      });
    }
    pen.font = font(12);
    pen.fillStyle = colours.soft;
    pen.fillText("whole run", 2, height / 2);
    const left = x(Math.max(0, view.from)), right = x(Math.min(end, view.to));
    pen.strokeStyle = colours.mark;
    pen.lineWidth = 2;
    pen.strokeRect(Math.min(left, width - 12), 1, Math.max(right - left, 4), height - 2);
  }

  function draw() {
    drawGantt();
    drawOverview();
    const middle = (view.from + view.to) / 2;
    const here = shown.find((pass) => view.from >= pass.start - 1 && view.to <= pass.end + 1 && middle < pass.end);
    chooser.value = here ? here.name : "";
  }

  function look(from, to) {
    const least = Math.min(end, 1), span = Math.min(end, Math.max(least, to - from));
    const start = Math.min(Math.max(0, from), end - span);
    view = { from: start, to: start + span };
    draw();
  }
  function zoom(factor, at) {
    const centre = at === undefined ? (view.from + view.to) / 2 : at;
    look(centre - (centre - view.from) * factor, centre + (view.to - centre) * factor);
  }
  function show(pass) {
    if (pass) look(pass.start, pass.end);
  }
  function neighbour(step) {
    const middle = (view.from + view.to) / 2;
    const later = shown.filter((pass) => pass.start > middle), earlier = shown.filter((pass) => pass.end <= middle);
    show(step > 0 ? later[0] : earlier[earlier.length - 1]);
  }

  const timeAt = (event) => {
    const box = gantt.getBoundingClientRect();
    return view.from + ((event.clientX - box.left - LABEL) / (box.width - LABEL - 8)) * (view.to - view.from);
  };
  function barAt(event) {
    const box = gantt.getBoundingClientRect(), n = Math.floor((event.clientY - box.top - AXIS) / ROW);
    if (n < 0 || n >= lanes.length || event.clientX - box.left < LABEL) return -1;
    const slack = ((view.to - view.from) / box.width) * 2, time = timeAt(event);
    const k = firstAfter(rows[n], time - slack);
    return k < rows[n].length && bars.start[rows[n][k]] <= time + slack ? rows[n][k] : -1;
  }

  function point(event) {
    const found = barAt(event);
    if (found !== hover) { hover = found; drawGantt(); }
    tip.style.display = found < 0 ? "none" : "block";
    if (found < 0) return;
    const us = bars.length[found], moved = bars.bytes[found], lines = [];
    lines.push("pass " + bars.pass[found] + ", layer " + bars.layer[found]
      + (bars.expert[found] >= 0 ? ", expert " + bars.expert[found] : "")
      + (bars.batch[found] >= 0 ? ", micro-batch " + bars.batch[found] : ""));
    lines.push(seconds(us) + ", from " + moment(bars.start[found], us / 10 || 1));
    if (moved > 0) {
      const rate = us > 0 ? moved / us / 1e3 : 0, roof = data.roofs[bars.lane[found]];
      lines.push(size(moved) + (us > 0 ? " at " + digits(rate) + " GB/s" : "")
        + (us > 0 && roof ? " (" + Math.round((rate * 1e11) / roof) + " % of the roof)" : ""));
    }
    if (bars.cause[found] >= 0) {
      const late = bars.start[found] - bars.until[found];
      lines.push("waited for " + data.causes[bars.cause[found]] + ", done " + seconds(Math.max(0, late)) + " before");
    }
    tip.replaceChildren();
    tip.appendChild(document.createElement("b")).textContent = data.kinds[bars.kind[found]].name + " on " + lanes[bars.lane[found]];
    for (const line of lines) tip.appendChild(document.createElement("div")).textContent = line;
    const box = gantt.parentElement.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    tip.style.left = Math.max(0, Math.min(x + 14, box.width - tip.offsetWidth - 4)) + "px";
    tip.style.top = y + 18 + "px";
  }

  let grabbed = null;
  gantt.addEventListener("pointerdown", (event) => {
    grabbed = { x: event.clientX, from: view.from, to: view.to };
    gantt.setPointerCapture(event.pointerId);
    gantt.classList.add("moving");
  });
  gantt.addEventListener("pointermove", (event) => {
    if (!grabbed) { point(event); return; }
    const shift = ((event.clientX - grabbed.x) / (gantt.clientWidth - LABEL - 8)) * (grabbed.to - grabbed.from);
    look(grabbed.from - shift, grabbed.to - shift);
  });
  const release = () => { grabbed = null; gantt.classList.remove("moving"); };
  gantt.addEventListener("pointerup", release);
  gantt.addEventListener("pointercancel", release);
  gantt.addEventListener("pointerleave", () => { hover = -1; tip.style.display = "none"; drawGantt(); });
  gantt.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const shift = (event.deltaX / gantt.clientWidth) * (view.to - view.from);
      look(view.from + shift, view.to + shift);
    } else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 400))), timeAt(event));
  }, { passive: false });
  gantt.addEventListener("dblclick", (event) => {
    const time = timeAt(event);
    show(shown.find((pass) => pass.start <= time && time < pass.end));
  });
  gantt.addEventListener("keydown", (event) => {
    const step = (view.to - view.from) / 5;
    const act = {
      ArrowLeft: () => look(view.from - step, view.to - step), ArrowRight: () => look(view.from + step, view.to + step),
      "+": () => zoom(.6), "=": () => zoom(.6), "-": () => zoom(1 / .6), "0": () => look(0, end),
      n: () => neighbour(1), p: () => neighbour(-1),
    }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  const jump = (event) => {
    const box = overview.getBoundingClientRect();
    const time = ((event.clientX - box.left - LABEL) / (box.width - LABEL - 8)) * end, half = (view.to - view.from) / 2;
    look(time - half, time + half);
  };
  overview.addEventListener("pointerdown", (event) => { overview.setPointerCapture(event.pointerId); jump(event); });
  overview.addEventListener("pointermove", (event) => { if (event.buttons) jump(event); });

  chooser.appendChild(new Option("", ""));
  for (const pass of shown) chooser.appendChild(new Option("pass " + pass.name, pass.name));
  chooser.addEventListener("change", () => show(shown.find((pass) => pass.name === chooser.value)));
  document.getElementById("before").addEventListener("click", () => neighbour(-1));
  document.getElementById("after").addEventListener("click", () => neighbour(1));
  document.getElementById("closer").addEventListener("click", () => zoom(.5));
  document.getElementById("farther").addEventListener("click", () => zoom(2));
  document.getElementById("whole").addEventListener("click", () => look(0, end));
  for (const button of document.querySelectorAll("button.goto")) {
    const from = Number(button.dataset.from), length = Number(button.dataset.length);
    button.addEventListener("click", () => {
      look(from - length, from + 2 * length);
      gantt.focus({ preventScroll: true });
      overview.scrollIntoView({ block: "center" });
    });
  }
  const again = () => { readColours(); draw(); };
  window.addEventListener("resize", again);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  readColours();
  show(shown[data.first] || { start: 0, end: end });
})();
