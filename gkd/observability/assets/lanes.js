'use strict';
// One step as lanes: what every worker did when, from the run's timeline.

const Lanes = (() => {
  const WIDTH = 1000, ROW = 20, LEFT = 130;

  // Eight colours, then the same ones paler.
  const paint = i => ({ fill: `var(--c${i % 8})`, opacity: 0.55 ** Math.floor(i / 8) });

  const plot = (spans, colours) => {
    const start = Math.min(...spans.map(span => span.start)), end = Math.max(...spans.map(span => span.start + span.length));
    const lanes = [...new Set(spans.map(span => span.lane))];
    const scale = (WIDTH - LEFT - 10) / Math.max(1e-9, end - start);
    const height = lanes.length * ROW + 24;
    const picture = svg('svg', { viewBox: `0 0 ${WIDTH} ${height}`, width: '100%', role: 'img', 'aria-label': 'timeline of a step' });
    picture.style.minWidth = '800px';
    lanes.forEach((lane, i) => picture.append(svg('text', { x: 0, y: i * ROW + 14 }, lane)));
    for (const span of spans) {
      const box = svg('rect', {
        x: LEFT + (span.start - start) * scale, y: lanes.indexOf(span.lane) * ROW + 3, rx: 2, height: ROW - 6,
        width: Math.max(1, span.length * scale), ...paint(colours.indexOf(span.name)),
      });
      box.append(svg('title', {}, `${span.name}: ${figure(span.length)} s${span.why ? `, ${span.why}` : ''}`));
      picture.append(box);
    }
    picture.append(svg('text', { x: LEFT, y: height - 6 }, '0 s'));
    picture.append(svg('text', { x: WIDTH - 10, y: height - 6, 'text-anchor': 'end' }, `${figure(end - start)} s`));
    return picture;
  };

  const draw = (parent, run, named) => {
    const last = run.steps[run.steps.length - 1]; // of what the driver does after it nothing is to be chosen
    const steps = [...new Set(run.timeline.map(span => span.step))].filter(step => step <= last).sort((a, b) => a - b);
    if (!steps.length) return;
    const colours = [...new Set(run.timeline.map(span => span.name))];
    const place = el('div', { class: 'scroll' });
    const choose = el('select', { 'aria-label': 'step', onchange: () => show(Number(choose.value)) },
      ...steps.map(step => el('option', { value: step }, `step ${step}`)));
    const show = step => place.replaceChildren(plot(run.timeline.filter(span => span.step === step), colours));
    choose.value = steps[steps.length - 1];
    show(steps[steps.length - 1]);
    const legend = el('div', { class: 'legend' }, ...colours.map((name, i) => {
      const swatch = el('i'), { fill, opacity } = paint(i);
      Object.assign(swatch.style, { borderTopColor: fill, opacity });
      return el('span', {}, swatch, name);
    }));
    parent.append(el('figure', { style: 'margin-top: 12px' }, el('h3', {}, named ? `timeline: ${run.name} ` : 'timeline ', choose), legend, place));
  };

  return { draw };
})();
