'use strict';
// Which metrics are drawn together, and where. What no rule knows comes last, each in a chart of its own.

const Panels = (() => {
  const RULES = [
    ['learning', null, /^val\/(?!.*failed$)/],
    ['learning', 'KL between student and teacher, nats', /^distill\/(reverse_kl|forward_kl)$/],
    ['learning', 'probability of the teacher\u2019s K tokens', /^distill\/(teacher|student)_mass$/],
    ['learning', 'reward', /^reward\/(.+\/)?mean$/],
    ['learning', 'spread of rewards', /^reward\/std$/],
    ['learning', 'groups without signal, share', /^reward\/equal_groups$/],
    ['learning', 'losses', /^(distill\/loss|actor\/(.+_)?loss)$/],
    ['learning', 'entropy of the student, nats', /^actor\/entropy/],
    ['learning', 'response length, tokens', /^response\/length_/],
    ['learning', 'responses cut off, share', /^response\/clip_ratio$/],
    ['learning', 'KL to the reference, nats', /^actor\/kl_reference$/],
    ['learning', 'KL to the reference of what each reward prefers, nats', /^reward\/.+\/kl$/],
    ['learning', null, /^(advantage|response|distill)\//],
    ['health', 'engine against trainer: KL, nats', /^mismatch\/.*kl/],
    ['health', 'engine against trainer: importance ratio', /^mismatch\/.*ratio/],
    ['health', 'staleness, versions', /^staleness\//],
    ['health', 'norm of the gradient before clipping', /^actor\/grad_norm$/],
    ['health', 'tokens outside the clip range, share', /^actor\/clip_fraction$/],
    ['health', 'learning rate', /^actor\/lr$/],
    ['health', 'rewards that failed, share', /^(val\/)?reward\/.*failed$/],
    ['health', 'seconds of a reward, a sample', /^reward\/.*seconds$/],
    ['health', null, /^(mismatch|actor)\//],
    ['time', 'what may overlap with a step, seconds', /^timing_s\/(generate|score|reward|overlap|validation)$/],
    ['time', 'tokens a second, and a second a GPU', /^perf\/tokens/],
    ['time', 'busy, share of a step', /^perf\/busy/],
    ['time', 'waits, share of a step', /^perf\/waits/],
    ['time', null, /^(perf|timing_s)\//],
  ];
  // Drawn by panels of their own, or as bands.
  const SKIPPED = /^memory\/|^timing_s\/(step|wait|update|drain|sync)$|^(epoch)$|^val\/.+\/stderr$/;
  const STAGES = ['wait', 'update', 'drain', 'sync']; // which add up to timing_s/step

  const names = runs => [...new Set(runs.flatMap(run => Object.keys(run.metrics)))];

  const lines = (runs, metrics) => runs.flatMap((run, r) => metrics.flatMap((metric, m) => {
    const values = run.metrics[metric];
    if (!values) return [];
    return [{
      label: runs.length > 1 ? (metrics.length > 1 ? `${run.name} ${metric}` : run.name) : metric, metric,
      steps: run.steps, values, colour: runs.length > 1 ? r : m, // of which there are eight
      dash: runs.length > 1 ? m + Math.floor(r / 8) : Math.floor(m / 8),
    }];
  }));

  // Ends of the 95 % interval: Wilson's of val/accuracy, a share of n answers; of a set's that of its standard error.
  const interval = (run, metric) => {
    const n = run.n_val, values = run.metrics[metric], z = 1.959964, z2 = z ** 2;
    const errors = run.metrics[metric.replace(/accuracy$/, 'stderr')];
    const wilson = (p, sign) => (p + z2 / (2 * n) + sign * Math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n)))) / (1 + z2 / n);
    const end = sign => values.map((p, i) => p === null || (errors && errors[i] === null) ? null
      : errors ? p + sign * z * errors[i] : wilson(p, sign));
    return [1, -1].map(sign => ({ label: '', metric: null, steps: run.steps, values: end(sign), colour: 0, dash: 0, edge: true }));
  };

  const hasInterval = (run, metric) => metric === 'val/accuracy' ? run.n_val > 0
    : /^val\/.+\/accuracy$/.test(metric) && metric.replace(/accuracy$/, 'stderr') in run.metrics;

  const KINDS = { warning: 'warn', death: 'bad', restart: 'bad' };
  const marks = (runs, metrics) => runs.flatMap(run => run.events
    .filter(event => KINDS[event.kind] && (metrics === null || metrics.includes(event.metric)))
    .map(event => [event.step, KINDS[event.kind]]));

  // Validation's metrics by what they draw: those that are equal in all runs, as of a single reward, share a chart.
  const alone = (runs, names) => {
    const groups = new Map();
    for (const name of names) {
      const key = name.startsWith('val/') ? JSON.stringify(runs.map(run => run.metrics[name] || null)) : name;
      groups.set(key, [...(groups.get(key) || []), name]);
    }
    return [...groups.values()].map(equal => {
      const drawn = equal.find(name => runs.some(run => hasInterval(run, name))) || equal[0];
      return [equal.join(', '), [drawn], equal];
    });
  };

  const charts = (runs, places) => {
    const left = new Set(names(runs).filter(name => !SKIPPED.test(name)));
    for (const [panel, title, pattern] of RULES) {
      const matches = [...left].filter(name => pattern.test(name));
      matches.forEach(name => left.delete(name));
      const groups = title === null ? alone(runs, matches) : matches.length ? [[title, matches, matches]] : [];
      for (const [heading, metrics, named] of groups) {
        const drawn = lines(runs, metrics);
        if (runs.length === 1 && hasInterval(runs[0], metrics[0])) drawn.push(...interval(runs[0], metrics[0]));
        Charts.draw(places[panel], heading, drawn, marks(runs, panel === 'health' ? null : named));
      }
    }
    for (const name of left) Charts.draw(places.other, name, lines(runs, [name]), marks(runs, [name]));
  };

  // What a step's seconds went to: the stages that add up to it, one above the other.
  const stages = (run, title, parent) => {
    const total = run.metrics['timing_s/step'];
    if (!total) return;
    const sums = total.map(() => 0);
    const stacked = STAGES.filter(stage => run.metrics[`timing_s/${stage}`]).map((stage, i) => {
      const metric = `timing_s/${stage}`, shown = run.metrics[metric];
      const values = shown.map((value, at) => total[at] === null ? null : (sums[at] += value || 0));
      return { label: stage, metric, steps: run.steps, colour: i, dash: 0, fill: true, shown, values };
    });
    const step = { label: 'step', metric: 'timing_s/step', steps: run.steps, colour: 7, dash: 0, values: total };
    Charts.draw(parent, title, [...stacked.reverse(), step], []); // the highest first, so that the lower ones lie over it
  };

  const memory = (runs, parent) => {
    const groups = [...new Set(names(runs).map(name => (/^memory\/([^/]+)\/\w+_gb$/.exec(name) || [])[1]).filter(Boolean))];
    for (const group of groups) {
      const pattern = new RegExp(`^memory/${group}/\\w+_gb$`);
      const series = lines(runs, names(runs).filter(name => pattern.test(name)));
      runs.forEach((run, r) => {
        if (run.plan[group] === undefined) return;
        const label = runs.length > 1 ? `${run.name} planned` : 'planned';
        series.push({ label, metric: null, steps: run.steps, values: run.steps.map(() => run.plan[group]), colour: 7, dash: 1 });
      });
      Charts.draw(parent, `${group}: GB of its largest worker`, series, []);
    }
    for (const name of names(runs).filter(name => /^memory\/.*\/(alloc_retries|ooms)$/.test(name)))
      if (runs.some(run => (run.metrics[name] || []).some(value => value > 0)))
        Charts.draw(parent, name, lines(runs, [name]), []);
  };

  return { charts, stages, memory };
})();
