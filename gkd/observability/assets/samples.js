'use strict';
// Samples: a table that sorts, and below a row all samples of its prompt with their tokens coloured.

const Samples = (() => {
  const PAGE = 100, FULL = 3; // rows at a time; nats at which a colour is full
  let texts = [];
  const tip = el('div', { class: 'tip', role: 'tooltip', hidden: '' });

  const visible = text => text === '' ? '\u2205' : text.replace(/\n/g, '\u21b5\n').replace(/\t/g, '\u21e5\t');
  const chance = logprob => logprob === null || logprob === undefined ? '0' : figure(Math.exp(logprob));

  const describe = (tokens, i) => {
    const rows = [];
    const add = (name, logprob) => rows.push(el('tr', {}, el('td', {}, name),
      el('td', { class: 'n' }, chance(logprob)), el('td', { class: 'n muted' }, logprob === null ? '-\u221e' : figure(logprob))));
    if (tokens.s) add('student', tokens.s[i]);
    if (tokens.h) add('teacher', tokens.h[i]);
    const likely = tokens.k ? tokens.k[i] : [];
    const top = likely.map(([text, logprob]) => el('tr', {}, el('td', { class: 'mono' }, visible(texts[text])),
      el('td', { class: 'n' }, chance(logprob)), el('td', { class: 'n muted' }, figure(logprob))));
    return [
      el('b', { class: 'mono' }, visible(texts[tokens.t[i]])),
      el('table', {}, el('tr', {}, el('th'), el('th', { class: 'n' }, 'p'), el('th', { class: 'n' }, 'log p')), ...rows),
      top.length ? el('table', {}, el('tr', {}, el('th', { colspan: 3 }, 'the teacher\u2019s likeliest')), ...top) : null,
    ].filter(Boolean);
  };

  const show = (target, tokens, i) => {
    tip.replaceChildren(...describe(tokens, i));
    tip.hidden = false;
    const at = target.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const left = Math.max(4, Math.min(at.left, document.documentElement.clientWidth - own.width - 4));
    const below = at.bottom + 6 + own.height < innerHeight;
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${(below ? at.bottom + 6 : Math.max(4, at.top - own.height - 6)) + scrollY}px`;
  };
  const hide = () => { tip.hidden = true; };

  const colour = gap => {
    const strength = Math.min(1, Math.abs(gap) / FULL) * (gap < 0 ? 0.75 : 0.6);
    return strength < 0.03 ? '' : `rgba(var(--${gap < 0 ? 'less' : 'more'}), ${strength.toFixed(3)})`;
  };

  const coloured = sample => {
    const tokens = sample.tokens;
    const line = el('div', { class: 'tokens' });
    tokens.t.forEach((text, i) => {
      const span = el('span', { tabindex: 0 }, visible(texts[text]));
      if (tokens.h && tokens.s) {
        const teacher = tokens.h[i], gap = teacher === null ? -Infinity : teacher - tokens.s[i];
        span.style.backgroundColor = colour(gap);
        span.dataset.gap = Number.isFinite(gap) ? gap.toFixed(4) : '-inf';
      }
      for (const [event, act] of [['mouseenter', () => show(span, tokens, i)], ['focus', () => show(span, tokens, i)],
        ['mouseleave', hide], ['blur', hide]]) span.addEventListener(event, act);
      line.append(span);
    });
    const more = sample.length - tokens.t.length;
    if (more > 0) line.append(el('i', { class: 'muted' }, ` \u2026 ${more.toLocaleString('en-US')} more tokens`));
    return line;
  };

  const rewards = sample => Object.entries(sample.rewards || {}).map(([name, value]) => `${name} ${figure(value)}`).join(', ');

  const detail = sample => el('div', { class: 'card' },
    el('h3', {}, [sample.run, `step ${sample.step}`, `sample ${sample.index ?? ''}`, sample.finish_reason,
      `${sample.length ?? '?'} tokens`, rewards(sample)].filter(Boolean).join(' \u00b7 ')),
    sample.tokens ? coloured(sample) : el('div', { class: 'tokens' }, sample.response),
    sample.tokens ? el('details', {}, el('summary', { class: 'muted' }, 'as text'), el('div', { class: 'prompt mono' }, sample.response)) : null);

  const samePrompt = (all, sample) => {
    const same = all.filter(other => other.prompt === sample.prompt);
    const near = same.filter(other => other.step === sample.step && other.run === sample.run);
    const others = same.filter(other => !near.includes(other));
    return [...near.slice(0, 8), ...others.slice(0, 8 - Math.min(8, near.length))].sort((a, b) => a.step - b.step);
  };

  const expand = (all, sample) => el('div', {},
    el('h3', {}, 'prompt'), el('div', { class: 'prompt mono card' }, sample.prompt),
    sample.answer ? el('p', {}, el('span', { class: 'muted' }, 'reference answer '), el('span', { class: 'mono' }, sample.answer)) : null,
    el('div', { class: 'grid' }, ...samePrompt(all, sample).map(detail)));

  const COLUMNS = [
    ['run', sample => sample.run, false],
    ['step', sample => sample.step, true],
    ['prompt', sample => sample.prompt, false],
    ['response', sample => sample.response, false],
    ['tokens', sample => sample.length, true],
    ['reward', sample => sample.reward, true],
    ['student log p', sample => sample.logprob_mean, true],
    ['teacher log p', sample => sample.teacher_logprob_mean, true],
    ['teacher - student', sample => sample.gap, true],
    ['end', sample => sample.finish_reason, false],
  ];

  const draw = (parent, runs, vocabulary) => {
    texts = vocabulary;
    const all = runs.flatMap(run => run.samples.map(sample => ({
      ...sample, run: runs.length > 1 ? run.name : null,
      gap: sample.teacher_logprob_mean !== undefined && sample.logprob_mean !== undefined
        ? sample.teacher_logprob_mean - sample.logprob_mean : null,
    })));
    if (!all.length) {
      parent.append(el('p', { class: 'muted' }, 'The run logged no samples (trainer.n_logged_samples).'));
      return;
    }
    const columns = COLUMNS.filter(([, get]) => all.some(sample => get(sample) !== null && get(sample) !== undefined));
    const taught = all.some(sample => sample.tokens && sample.tokens.h);
    const body = el('tbody'), count = el('span', { class: 'muted' });
    const search = el('input', { type: 'search', placeholder: 'search prompts and responses', 'aria-label': 'search' });
    const more = el('button', { type: 'button' }, 'more');
    let by = columns.findIndex(([name]) => name === 'step'), down = true, shown = PAGE, open = null;

    const rows = () => {
      const word = search.value.toLowerCase();
      const get = columns[by][1], sign = down ? -1 : 1;
      const matches = word ? all.filter(s => `${s.prompt}\n${s.response}`.toLowerCase().includes(word)) : [...all];
      const none = value => value === null || value === undefined;
      return matches.sort((a, b) => {
        const x = get(a), y = get(b);
        if (none(x) || none(y)) return none(x) - none(y);
        return (x < y ? -1 : x > y ? 1 : 0) * sign;
      });
    };
    const fill = () => {
      const matches = rows();
      body.replaceChildren(...matches.slice(0, shown).flatMap(sample => {
        const row = el('tr', { tabindex: 0, class: sample === open ? 'open' : null },
          ...columns.map(([, get, number]) => el('td', { class: number ? 'n' : 'text mono', title: null },
            typeof get(sample) === 'number' ? figure(get(sample)) : (get(sample) ?? '').slice(0, 200))));
        const toggle = () => { open = open === sample ? null : sample; fill(); };
        row.addEventListener('click', toggle);
        row.addEventListener('keydown', event => { if (event.key === 'Enter') toggle(); });
        return sample === open ? [row, el('tr', {}, el('td', { colspan: columns.length }, expand(all, sample)))] : [row];
      }));
      more.hidden = matches.length <= shown;
      count.textContent = ` ${Math.min(shown, matches.length)} of ${matches.length} samples`;
    };
    const heads = columns.map(([name, , number], i) => el('th', { class: number ? 'n' : null }, el('button', {
      type: 'button', onclick: () => { down = by === i ? !down : number; by = i; shown = PAGE; hide(); fill(); },
    }, name)));
    search.addEventListener('input', () => { shown = PAGE; fill(); });
    more.addEventListener('click', () => { shown += PAGE; fill(); });
    open = rows().find(sample => sample.tokens) || null;
    parent.append(
      el('p', {}, search, count),
      el('p', { class: 'muted' }, 'A row opens the samples of its prompt side by side.', ...(taught
        ? [' Tokens: log p of the teacher less that of the student, -3', el('span', { class: 'scale' }),
          '3 nats; point at one for the teacher\u2019s likeliest.'] : [])),
      el('div', { class: 'scroll' }, el('table', { class: 'samples' }, el('thead', {}, el('tr', {}, ...heads)), body)), more);
    document.body.append(tip);
    fill();
  };

  return { draw };
})();
