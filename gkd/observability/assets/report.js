'use strict';
// The page: what a run came to, its charts, its events, and its samples.

const page = JSON.parse(document.getElementById('data').textContent);
const { runs } = page;

const section = (id, title) => {
  const grid = el('div', { class: 'grid' });
  const node = el('section', { id }, el('h2', {}, title), grid);
  document.body.append(node);
  return { node, grid };
};

const share = value => value === undefined || value === null ? '' : figure(value);

const outcome = run => {
  const summary = run.summary;
  if (!summary) return null;
  const names = [...new Set(['before', 'after', 'teacher'].flatMap(when => Object.keys(summary[when] || {})))]
    .filter(name => !/^val\/.+\/stderr$/.test(name)); // they are in the intervals
  const hasTeacher = Object.keys(summary.teacher || {}).length > 0;
  if (!names.length) return null;
  const cell = (values, name) => {
    const value = (values || {})[name], range = (run.intervals[name] || {})[values === summary.before ? 'before' : values === summary.after ? 'after' : 'teacher'];
    return el('td', { class: 'n', title: range ? `95 % interval, ${name === 'val/accuracy' ? 'Wilson' : 'over questions'}` : null }, share(value),
      range && value !== undefined ? el('span', { class: 'muted' }, ` [${range.map(figure).join(', ')}]`) : null);
  };
  return el('div', { class: 'scroll' }, el('table', { class: 'outcome' },
    el('tr', {}, ...['', 'before', 'after', 'change', ...(hasTeacher ? ['teacher'] : [])].map((name, i) => el('th', { class: i ? 'n' : null }, name))),
    ...names.map(name => {
      const [before, after] = [summary.before[name], summary.after[name]];
      const change = before === undefined || after === undefined ? null : after - before;
      return el('tr', {}, el('td', { class: 'mono' }, name), cell(summary.before, name), cell(summary.after, name),
        el('td', { class: 'n' }, change === null ? '' : `${change > 0 ? '+' : ''}${figure(change)}`),
        hasTeacher ? cell(summary.teacher, name) : null);
    })));
};

const state = run => {
  const last = run.events[run.events.length - 1], end = last && last.kind === 'end' ? last : null;
  const step = run.steps.length ? run.steps[run.steps.length - 1] : 0;
  const of = `step ${step.toLocaleString('en-US')} of ${run.total_steps.toLocaleString('en-US')}`;
  if (run.summary) {
    const n = run.summary.steps, steps = `${n.toLocaleString('en-US')} step${n === 1 ? '' : 's'}`;
    const text = `finished, ${steps} in ${seconds(run.summary.wall_s)}`;
    return el('span', {}, el('span', { class: 'good' }, text), end && end.failed ? el('span', { class: 'bad' }, ` \u00b7 ${end.text}`) : null);
  }
  if (end && end.failed) return el('span', { class: 'bad' }, `${of}: ${end.text}`);
  return el('span', { class: 'warn' }, `not finished, ${of}`);
};

const pairs = (heads, rows) => el('div', { class: 'scroll' }, el('table', {},
  el('tr', {}, ...heads.map(head => el('th', {}, head))),
  ...rows.map(row => el('tr', {}, ...row.map(value => el('td', { class: 'mono' }, share(value)))))));

const shown = value => value === null ? 'null' : typeof value === 'object' ? JSON.stringify(value) : String(value);

const verdict = parent => runs.forEach(run => {
  const warnings = run.events.filter(event => event.kind === 'warning').length;
  const card = el('div', { class: 'card' }, el('h3', {}, run.name),
    el('p', {}, state(run), el('span', { class: 'muted' }, ` \u00b7 recipe ${run.recipe} \u00b7 gkd ${run.version || '?'}`),
      warnings ? el('span', { class: 'warn' }, ` \u00b7 ${warnings} warning${warnings > 1 ? 's' : ''}`) : null),
    outcome(run));
  if (run.differs)
    card.append(el('details', { open: run.differs.length && run.differs.length < 9 ? '' : null },
      el('summary', {}, run.differs.length === 1 ? 'one setting differs from the recipe'
        : run.differs.length ? `${run.differs.length} settings differ from the recipe` : 'all settings are the recipe\u2019s'),
      pairs(['setting', 'recipe', 'here'], run.differs.map(([name, there, here]) => [name, shown(there), shown(here)]))));
  if (run.placement.length)
    card.append(el('details', {}, el('summary', {}, `placement: ${run.placement.length} worker${run.placement.length > 1 ? 's' : ''}`),
      pairs(['group', 'rank', 'node', 'pid', 'GPU', 'UUID'], run.placement)));
  card.append(el('p', { class: 'muted mono' }, run.path));
  parent.append(card);
});

const events = parent => {
  const rows = runs.flatMap(run => run.events.map(event => [run, event]));
  if (!rows.length) return;
  const class_of = { warning: 'warn', death: 'bad', restart: 'bad' };
  parent.append(el('div', { class: 'scroll', style: 'margin-top: 12px' }, el('table', {},
    el('tr', {}, ...[runs.length > 1 ? 'run' : null, 'step', 'when', 'what', ''].filter(x => x !== null).map(name => el('th', {}, name))),
    ...rows.map(([run, event]) => el('tr', {},
      runs.length > 1 ? el('td', {}, run.name) : null, el('td', { class: 'n' }, share(event.step)),
      el('td', { class: 'muted' }, new Date(event.time * 1000).toLocaleString()),
      el('td', { class: event.failed ? 'bad' : class_of[event.kind] || null }, event.kind),
      el('td', { class: 'text' }, event.text))))));
};

const draw = () => {
  document.body.append(el('h1', {}, runs.map(run => run.name).join(' \u00b7 ')),
    el('p', { class: 'muted' }, `written ${new Date(page.written * 1000).toLocaleString()}${page.notes.length ? ` \u00b7 ${page.notes.join(' \u00b7 ')}` : ''}`));
  const nav = el('nav', { 'aria-label': 'panels' });
  document.body.append(nav);
  const parts = {
    verdict: section('verdict', 'Verdict'), learning: section('learning', 'Learning'), health: section('health', 'Health'),
    time: section('time', 'Time'), memory: section('memory', 'Memory'), other: section('other', 'Other metrics'),
    samples: section('samples', 'Samples'),
  };
  const places = Object.fromEntries(Object.entries(parts).map(([name, part]) => [name, part.grid]));
  verdict(places.verdict);
  runs.forEach(run => Panels.stages(run, runs.length > 1 ? `seconds of a step: ${run.name}` : 'seconds of a step', places.time));
  Panels.charts(runs, places);
  Panels.memory(runs, places.memory);
  events(parts.health.node);
  runs.forEach(run => Lanes.draw(parts.time.node, run, runs.length > 1));
  Samples.draw(parts.samples.node, runs, page.texts);
  for (const [name, { node, grid }] of Object.entries(parts)) {
    if (!grid.childElementCount && node.childElementCount < 3) node.remove();
    else nav.append(el('a', { href: `#${name}` }, node.querySelector('h2').textContent));
  }
};

draw();
addEventListener('load', () => { document.documentElement.dataset.drawn = Math.round(performance.now()); }); // ms
