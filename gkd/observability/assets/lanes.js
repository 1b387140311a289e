'use strict';
// One step as lanes: what every worker did when, from the run's timeline.

const Lanes = (() => {
  const WIDTH = 1000, ROW = 20, LEFT = 130;

  const plot = (spans, colours) => {
    const start = Math.min(...spans.map(span => span.start)), end = Math.max(...spans.map(span => span.start + span.length));
    const lanes = [...new Set(spans.map(span => span.lane))];
    const scale = (WIDTH - LEFT - 10) / Math.max(1e-9, end - start);
    const height = lanes.length * ROW + 24;
    const picture = svg('svg', { viewBox: `0 0 ${WIDTH} ${height}`, width: '100%', role: 'img', 'aria-label': 'timeline of a step' });
    picture.style.minWidth = '560px';
    lanes.forEach((lane, i) => picture.append(svg('text', { x: 0, y: i * ROW + 14 }, lane)));
    for (const span of spans) {
      const box = svg('rect', {
        x: LEFT + (span.start - start) * scale, y: lanes.indexOf(span.lane) * ROW + 3, rx: 2, height: ROW - 6,
        width: Math.max(1, span.length * scale), fill: `var(--c${colours.indexOf(span.name) % 8})`,
      });
      box.append(svg('title', {}, `${span.name}: ${figure(span.length)} s${span.why ? `, ${span.why}` : ''}`));
      picture.append(box);
    }
    picture.append(svg('text', { x: LEFT, y: height - 6 }, '0 s'));
    picture.append(svg('text', { x: WIDTH - 10, y: height - 6, 'text-anchor': 'end' }, `${figure(end - start)} s`));
    return picture;
  };

  const draw = (parent, run, named) => {
    if (!run.timeline.length) return;
    const steps = [...new Set(run.timeline.map(span => span.step))].sort((a, b) => a - b);
    const colours = [...new Set(run.timeline.map(span => span.name))];
    const place = el('div', { class: 'scroll' });
    const choose = el('select', { 'aria-label': 'step', onchange: () => show(Number(choose.value)) },
      ...steps.map(step => el('option', { value: step }, `step ${step}`)));
    const show = step => place.replaceChildren(plot(run.timeline.filter(span => span.step === step), colours));
    choose.value = steps[steps.length - 1];
    show(steps[steps.length - 1]);
    const legend = el('div', { class: 'legend' }, ...colours.map((name, i) => {
      const swatch = el('i');
      swatch.style.borderTopColor = `var(--c${i % 8})`;
      return el('span', {}, swatch, name);
    }));
    parent.append(el('figure', { style: 'margin-top: 12px' }, el('h3', {}, named ? `timeline: ${run.name} ` : 'timeline ', choose), legend, place));
  };

  return { draw };
})();
