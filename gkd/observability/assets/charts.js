'use strict';
// Elements, numbers, and charts: one a group of metrics, over the steps of all runs.

const el = (tag, attributes, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  // Strings become text, never markup; halves of surrogate pairs, which some programs choke on, are replaced.
  node.append(...children.filter(child => child !== null && child !== undefined)
    .map(child => typeof child === 'string' && child.toWellFormed ? child.toWellFormed() : child));
  return node;
};

const svg = (tag, attributes, text) => {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
};

const figure = value => {
  if (value === null || value === undefined) return '';
  if (typeof value !== 'number') return String(value);
  const size = Math.abs(value);
  if (value === 0) return '0';
  if (size < 1e-3) return value.toExponential(2);
  if (size >= 1e4) return Math.round(value).toLocaleString('en-US');
  return String(Number(value.toPrecision(4)));
};

// A tick of an axis whose ticks are `step` apart: as many decimals as tell them apart.
const tickText = (tick, step) => {
  const size = Math.max(Math.abs(tick), step);
  if (tick === 0) return '0';
  if (size >= 1e6 || size < 1e-3 && step < 1e-6) {
    return tick.toExponential(Math.min(20, Math.max(1, Math.ceil(Math.log10(size / step) - 1e-9))));
  }
  let digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  if (Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits += 1; // such as 0.25
  return tick.toLocaleString('en-US', { maximumFractionDigits: digits });
};

const seconds = value => {
  const whole = Math.round(value), s = whole % 60, m = Math.floor(whole / 60) % 60, h = Math.floor(whole / 3600);
  return h ? `${h} h ${m} min` : m ? `${m} min ${s} s` : `${figure(value)} s`;
};

const Charts = (() => {
  const drawn = [];
  let colours = {};

  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    for (const name of ['text', 'muted', 'grid', 'warn', 'bad', 'good', 'c0', 'c1', 'c2', 'c3', 'c4', 'c5', 'c6', 'c7'])
      colours[name] = style.getPropertyValue(`--${name}`).trim();
  };
  readColours();
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
    readColours();
    for (const { plot, keys } of drawn) {
      plot.redraw(false);
      keys.forEach(paint => paint());
    }
  });

  const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
  const colour = i => colours[`c${i % 8}`];

  // Room for an axis' longest tick; charts whose ticks are short have one width, so that they stand below each other.
  const fitTicks = (plot, ticks) => {
    plot.ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    return Math.max(64, ...(ticks || []).map(tick => Math.ceil(plot.ctx.measureText(tick).width / devicePixelRatio) + 18));
  };

  // What is 0 or 1 throughout is drawn between 0 and 1, not up to 100 or 2. Values that differ in their last digits, as
  // those of float32, have room on both sides: uPlot rounds such a difference away, and draws no ticks without end.
  const range = (_, low, high) => {
    if (low === null || low === undefined) return [null, null];
    if (low === high && (low === 0 || low === 1)) return [0, 1];
    const least = 1e-5 * Math.max(Math.abs(low), Math.abs(high));
    return low !== high && high - low < least ? [low - least, high + least] : uPlot.rangeNum(low, high, 0.1, true);
  };

  // Areas begin at 0, or their heights say nothing.
  const rangeOf = lines => lines.some(line => line.fill) ? (_, low, high) => range(_, low === null ? null : 0, high) : range;

  const axis = wide => ({
    stroke: () => colours.muted,
    grid: { stroke: () => colours.grid, width: 1 },
    ticks: { stroke: () => colours.grid, width: 1 },
    font: '11px system-ui, sans-serif',
    size: wide ? fitTicks : 26,
    ...(wide ? { values: (_, ticks, __, ___, step) => ticks.map(tick => tickText(tick, step)) } : {}),
  });

  // Events as vertical lines: `marks` is [step, colour's name].
  const drawMarks = marks => plot => {
    const { left, top, width, height } = plot.bbox;
    plot.ctx.save();
    plot.ctx.setLineDash([4, 3]);
    for (const [step, name] of marks) {
      const x = plot.valToPos(step, 'x', true);
      if (x < left || x > left + width) continue;
      plot.ctx.strokeStyle = colours[name];
      plot.ctx.beginPath();
      plot.ctx.moveTo(x, top);
      plot.ctx.lineTo(x, top + height);
      plot.ctx.stroke();
    }
    plot.ctx.restore();
  };

  // The newest figure up to the place `last`.
  const newest = (values, last = values.length - 1) => {
    for (let i = last; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
    return null;
  };

  // `lines`: {label, metric, steps, values, colour, dash, fill, shown, edge}; `shown` are the figures where `values` are
  // sums. Two lines with `edge`, the upper one first, are the ends of a band without names or strokes.
  const draw = (parent, title, lines, marks) => {
    const keys = lines.map(line => {
      const value = el('b', {}, figure(newest(line.shown || line.values)));
      const swatch = el('i');
      const paint = () => { swatch.style.borderTopColor = colour(line.colour); };
      paint();
      if (line.dash % 4) swatch.style.borderTopStyle = line.dash % 4 === 1 ? 'dashed' : 'dotted';
      const chip = el('span', { 'data-metric': line.metric, hidden: line.edge }, swatch, `${line.label} `, value);
      return { value, chip, paint };
    });
    const box = el('figure', {}, el('h3', {}, title), el('div', { class: 'legend' }, ...keys.map(key => key.chip)));
    parent.append(box);
    const shared = lines.every(line => line.steps === lines[0].steps);
    const data = shared ? [lines[0].steps, ...lines.map(line => line.values)]
      : uPlot.join(lines.map(line => [line.steps, line.values]));
    const series = lines.map(line => ({
      stroke: () => line.edge ? 'transparent' : colour(line.colour), width: 1.5, dash: DASHES[line.dash % 4], spanGaps: true,
      points: { show: !line.edge && line.values.filter(value => value !== null).length < 40, size: 5 },
      ...(line.fill ? { fill: () => colour(line.colour) } : {}),
    }));
    const edges = lines.flatMap((line, i) => line.edge ? [i + 1] : []);
    const bands = edges.length ? [{ series: edges, fill: () => `${colour(lines[edges[0] - 1].colour)}30` }] : [];
    const show = plot => {
      const at = plot.cursor.idx;
      lines.forEach((line, i) => {
        keys[i].value.textContent = figure(at === null || at === undefined ? newest(line.shown || line.values)
          : newest(shared ? line.shown || line.values : data[i + 1], at));
      });
    };
    const plot = new uPlot({
      width: Math.max(200, box.clientWidth - 22), height: 170, legend: { show: false },
      cursor: { sync: { key: 'steps', scales: ['x', null] }, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: rangeOf(lines) } },
      series: [{}, ...series], bands, axes: [axis(false), axis(true)],
      hooks: { setCursor: [show], draw: [drawMarks(marks || [])] },
    }, data, box);
    new ResizeObserver(() => {
      const width = Math.max(200, box.clientWidth - 22);
      if (width !== plot.width) plot.setSize({ width, height: 170 });
    }).observe(box);
    drawn.push({ plot, lines, keys: keys.map(key => key.paint) });
  };

  return { draw, drawn };
})();
