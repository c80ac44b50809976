package autoplan

import (
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
)

// A Foreign is another stack's configuration, read as a plan.
type Foreign struct {
	Plan      *plan.Plan
	Precision dtype.Format
	Notes     []string // settings that the plan only approximates
}

// ReadForeign reads the configuration another stack is started with: Megatron's arguments or YAML,
// torchtitan's TOML, MaxText's YAML or arguments. Model, cluster and profile come from the job,
// and so do batch and sequence length if the text does not state them.
func ReadForeign(stack string, text []byte, path string, j Job) (*Foreign, error) {
	read := map[string]func(*settings, *Foreign, Job){
		"megatron": readMegatron, "torchtitan": readTorchtitan, "maxtext": readMaxText,
	}[stack]
	if read == nil {
		return nil, diag.New(diag.BadUsage, "there is no stack %q to read from", stack).
			Try("--from megatron=FILE, torchtitan=FILE or maxtext=FILE")
	}
	f := &Foreign{Plan: j.blank(j.Cluster.String()), Precision: dtype.FormatBF16}
	f.Plan.Seq, f.Plan.Batch = j.Seq, max(1, j.Batch)
	s := &settings{values: parseSettings(string(text)), path: path,
		arguments: strings.Contains(string(text), "--")}
	if len(s.values) == 0 {
		return nil, diag.New(diag.BadInput, "the file has no settings of %s", stack).At("%s", path).
			Try("give the file with its command line or configuration")
	}
	read(s, f, j)
	if s.err != nil {
		return nil, s.err
	}
	f.Plan.Precision, f.Plan.CP.Balance = precisionName(f.Precision), f.Plan.CP.Shards() > 1
	if n := f.Plan.Devices(); n != int64(j.Cluster.Count) {
		return nil, diag.New(diag.PlanMisfit, "its sizes make %d devices; the cluster has %d", n,
			j.Cluster.Count).At("%s", path).Try("--cluster %dx%s", n, j.Cluster.GPU.Name)
	}
	return f, nil
}

// settings are the names and values of a configuration, with the first error in reading one.
type settings struct {
	values    map[string]string
	path      string
	arguments bool // from a command line: an absent flag is off
	err       *diag.Error
}

// fail keeps the first error.
func (s *settings) fail(err *diag.Error) {
	if s.err == nil {
		s.err = err.At("%s", s.path)
	}
}

// parseSettings reads names and values in any of the usual forms: arguments with two dashes, lines
// of YAML or TOML, and NAME=VALUE. The last component of a dotted or sectioned name counts, dashes
// become underscores, and the last value of a name wins.
func parseSettings(text string) map[string]string {
	values := map[string]string{}
	last := ""
	set := func(name, value string) {
		if i := strings.LastIndex(name, "."); i >= 0 {
			name = name[i+1:]
		}
		name = strings.ToLower(strings.ReplaceAll(strings.Trim(name, "\"' "), "-", "_"))
		if name != "" && !strings.ContainsAny(name, " \t") {
			values[name] = strings.Trim(strings.TrimSpace(value), "\"',\\")
			last = name
		}
	}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if i := strings.Index(line, " #"); i >= 0 {
			line = strings.TrimSpace(line[:i])
		}
		name, value, colon := strings.Cut(line, ":")
		switch {
		case line == "" || line[0] == '#' || line[0] == '[':
		case strings.Contains(line, "--"):
			parseArguments(strings.Fields(line), set)
		case strings.HasPrefix(line, "- ") && last != "":
			values[last] = strings.Trim(values[last]+","+strings.Trim(line[2:], "\"' "), ",")
		case colon && !strings.Contains(name, "="):
			set(name, value)
		case strings.Contains(line, " = "):
			name, value, _ = strings.Cut(line, " = ")
			set(name, value)
		default:
			for word := range strings.FieldsSeq(line) {
				if name, value, ok := strings.Cut(word, "="); ok {
					set(name, value)
				}
			}
		}
	}
	return values
}

// parseArguments reads --name value, --name=value, and --name alone, which is true.
func parseArguments(words []string, set func(name, value string)) {
	for i := 0; i < len(words); i++ {
		name, ok := strings.CutPrefix(words[i], "--")
		if !ok {
			continue
		}
		name, value, given := strings.Cut(name, "=")
		if !given {
			value = "true"
			for i+1 < len(words) && !strings.HasPrefix(words[i+1], "--") && words[i+1] != "\\" {
				i++
				if value == "true" {
					value = words[i]
				} else {
					value += "," + words[i]
				}
			}
		}
		set(name, value)
	}
}

// number reads an integer, or returns the default. None and null are no value.
func (s *settings) number(name string, without int64) int64 {
	text, ok := s.values[name]
	if !ok || text == "" || strings.EqualFold(text, "none") || strings.EqualFold(text, "null") {
		return without
	}
	x, err := strconv.ParseFloat(text, 64)
	n := int64(x)
	if err != nil || float64(n) != x || n < -1 || n > 1<<24 {
		s.fail(diag.New(diag.BadInput, "%s is %q, not a whole number", name, text).
			Try("write a number from 1 to %d", 1<<24))
	}
	return n
}

// has reports whether the value of a setting contains a text, in any case.
func (s *settings) has(name, value string) bool {
	return strings.Contains(strings.ToLower(s.values[name]), value)
}

// yes reports whether a setting is switched on, in any spelling.
func (s *settings) yes(name string) bool {
	return strings.EqualFold(s.values[name], "true") || s.values[name] == "1"
}

// product multiplies the two sizes MaxText has for an axis: inside a host and between hosts.
func (s *settings) product(name string) int64 {
	return s.number("ici_"+name, 1) * s.number("dcn_"+name, 1)
}

// everything lists all recompute tags of a block.
func everything(j Job) []ir.Tag {
	tags := []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
	if j.Config.MoE != nil {
		tags = append(tags, ir.Experts)
	}
	return tags
}

// parsePrecision finds the format named in text.
func parsePrecision(text string, without dtype.Format) dtype.Format {
	text = strings.ToLower(text)
	for _, p := range []struct {
		part string
		is   dtype.Format
	}{{"nvfp4", dtype.NVFP4}, {"fp4", dtype.NVFP4}, {"mx", dtype.MXFP8}, {"fp8", dtype.FormatFP8},
		{"float8", dtype.FormatFP8}, {"bf16", dtype.FormatBF16}} {
		if strings.Contains(text, p.part) {
			return p.is
		}
	}
	return without
}

// foldExperts takes ep out of the data axis: other stacks fold expert parallelism over it.
func (f *Foreign) foldExperts(s *settings, data, ep int64) int64 {
	if ep <= 1 {
		return data
	}
	if data%ep != 0 {
		s.fail(diag.New(diag.PlanLater, "experts over %d devices where %d have rows of their own",
			ep, data).Try("an ep that divides %d", data))
		return data
	}
	f.Plan.EP = ep
	return data / ep
}

// splitBatch derives the number of microbatches from the sequences of one on a device.
func (f *Foreign) splitBatch(s *settings, microbatch int64) {
	p := f.Plan
	ranks := p.DataParallelSize()
	each := ranks * max(1, microbatch)
	if p.Batch%each != 0 {
		s.fail(diag.New(diag.PlanMisfit,
			"a batch of %d sequences does not divide over %d devices by %d", p.Batch, ranks,
			microbatch))
		return
	}
	p.Microbatches = max(1, p.Batch/each)
}

// stagesIn counts the stages of a Megatron layout string (see layoutOf).
func stagesIn(layout string) int64 {
	bars := func(text string) int64 { return int64(strings.Count(text, "|")) }
	n := 1 + bars(layout)
	for _, m := range repeats.FindAllStringSubmatch(layout, -1) {
		times, _ := strconv.ParseInt(m[2], 10, 32)
		n += bars(m[1]) * (times - 1)
	}
	return n
}

// repeats matches a repeated group of a Megatron layout, such as (t|)*3.
var repeats = regexp.MustCompile(`\(([^)]+)\)\*(\d{1,6})`)

// readMegatron reads Megatron-LM's and Megatron-Bridge's settings. dp is what tp, cp and pp leave
// of the devices.
func readMegatron(s *settings, f *Foreign, j Job) {
	p := f.Plan
	p.TP = plan.TP{Size: s.number("tensor_model_parallel_size", 1)}
	p.TP.Sequence = p.TP.Size > 1 && s.yes("sequence_parallel")
	p.CP = plan.CP{Size: s.number("context_parallel_size", 1), Kind: "ring"}
	switch s.values["cp_comm_type"] {
	case "all_gather":
		p.CP.Kind = "gather"
	case "a2a":
		p.CP.Kind = "a2a"
	case "a2a+p2p": // the sizes of an all-to-all, and of rings of them
		sizes := strings.Trim(s.values["hierarchical_context_parallel_sizes"], "[]")
		inner, _, _ := strings.Cut(sizes, ",")
		n, err := strconv.ParseInt(strings.TrimSpace(inner), 10, 64)
		if err != nil || n < 1 || p.CP.Size%n != 0 {
			s.fail(diag.New(diag.BadInput, "hierarchical_context_parallel_sizes is %q", sizes).
				Try("two sizes, the all-to-all's first, whose product is %d", p.CP.Size))
		}
		p.CP.Kind, p.CP.Inner = "a2a+ring", n
	}
	pp := s.number("pipeline_model_parallel_size", 1)
	virtual := s.number("virtual_pipeline_model_parallel_size",
		s.number("num_virtual_stages_per_pipeline_rank", 1))
	if n := s.number("num_layers_per_virtual_pipeline_stage", 0); n > 0 && pp > 0 {
		virtual = j.Config.Layers / pp / n
	}
	if text := s.values["pipeline_model_parallel_layout"]; text != "" && pp > 0 {
		virtual = stagesIn(text) / pp
	}
	p.PP = plan.PP{Size: pp, Virtual: max(1, virtual), Schedule: "1f1b"}
	if virtual > 1 {
		p.PP.Schedule = "interleaved"
	}
	p.Seq = s.number("seq_length", p.Seq)
	p.Batch = s.number("global_batch_size", p.Batch)
	others := max(1, p.TP.Size) * max(1, p.CP.Size) * max(1, pp)
	data := f.foldExperts(s, max(1, int64(j.Cluster.Count)/others),
		s.number("expert_model_parallel_size", 1))
	// Megatron-Bridge shards optimizer state unless the setting says no, Megatron-LM only if it says
	// yes.
	value, shown := s.values["use_distributed_optimizer"]
	if shown && !strings.EqualFold(value, "false") || !shown && !s.arguments {
		p.DP = max(1, s.number("num_distributed_optimizer_instances", 1))
		p.FSDP = plan.FSDP{Size: max(1, data/p.DP), Zero: 1, Gather: "step"}
	} else {
		p.DP = data
	}
	f.splitBatch(s, s.number("micro_batch_size", 1))
	switch {
	case s.has("recompute_granularity", "full"):
		p.Recompute = everything(j)
	case s.values["recompute_modules"] != "":
		for _, m := range []struct {
			word string
			tag  ir.Tag
		}{{"layernorm", ir.Norm}, {"attn", ir.Attn}, {"mla", ir.Attn}, {"mlp", ir.MLP},
			{"moe", ir.Experts}} {
			if s.has("recompute_modules", m.word) && !slices.Contains(p.Recompute, m.tag) {
				p.Recompute = append(p.Recompute, m.tag)
			}
		}
		if modules := strings.Split(s.values["recompute_modules"], ","); slices.Contains(modules, "moe") {
			f.Notes = append(f.Notes, "recomputing moe is taken for moe_act")
		}
	}
	format := s.values["fp8_recipe"] + s.values["fp4_format"] + s.values["fp4"]
	if s.values["fp8_format"] != "" || s.values["fp8"] != "" {
		format += "fp8"
	}
	f.Precision = parsePrecision(format+s.values["mixed_precision"], dtype.FormatBF16)
}

// readTorchtitan reads torchtitan's settings. Its FSDP shards over data_parallel_shard_degree and
// replicates over data_parallel_replicate_degree.
func readTorchtitan(s *settings, f *Foreign, j Job) {
	p := f.Plan
	p.TP = plan.TP{Size: s.number("tensor_parallel_degree", 1)}
	p.TP.Sequence = p.TP.Size > 1
	p.CP = plan.CP{Size: s.number("context_parallel_degree", 1), Kind: "gather"}
	p.PP = plan.PP{Size: s.number("pipeline_parallel_degree", 1), Schedule: "1f1b", Virtual: 1}
	switch name := strings.ToLower(s.values["pipeline_parallel_schedule"]); {
	case strings.Contains(name, "zbv"):
		p.PP.Schedule, p.PP.Virtual = "zb-v", 2
	case strings.Contains(name, "interleaved"):
		p.PP.Schedule, p.PP.Virtual = "interleaved", 2
	case name == "gpipe":
		p.PP.Schedule = name
	}
	others := max(1, p.TP.Size) * max(1, p.CP.Size) * max(1, p.PP.Size)
	p.DP = max(1, s.number("data_parallel_replicate_degree", 1))
	shard := s.number("data_parallel_shard_degree", -1)
	if shard < 1 {
		shard = max(1, int64(j.Cluster.Count)/others/p.DP)
	}
	shard = f.foldExperts(s, shard, s.number("expert_parallel_degree", 1))
	p.FSDP = plan.FSDP{Size: shard, Zero: 3, Gather: "layer"}
	keep := s.has("fsdp_reshard_after_forward", "never") ||
		p.PP.Size > 1 && !s.has("fsdp_reshard_after_forward", "always")
	if keep && shard > 1 {
		p.FSDP.Zero, p.FSDP.Gather = 2, "step"
	}
	p.Seq = s.number("seq_len", p.Seq)
	local := s.number("local_batch_size", s.number("batch_size", 1))
	if p.Batch = s.number("global_batch_size", -1); p.Batch < 1 {
		p.Batch = local * p.DataParallelSize()
	}
	if p.PP.Size > 1 {
		local = s.number("pipeline_parallel_microbatch_size", 1)
	}
	f.splitBatch(s, local)
	switch {
	case s.has("mode", "full"):
		p.Recompute = everything(j)
	case s.has("mode", "selective"):
		p.Recompute = []ir.Tag{ir.Norm}
		f.Notes = append(f.Notes, "selective checkpointing is taken for recomputing norms")
	}
	f.Precision = parsePrecision(s.values["converters"]+s.values["recipe_name"], dtype.FormatBF16)
}

// readMaxText reads MaxText's settings. A size of -1 takes the devices that the other axes leave.
func readMaxText(s *settings, f *Foreign, j Job) {
	p := f.Plan
	p.TP = plan.TP{Size: s.product("tensor_parallelism") *
		s.product("tensor_sequence_parallelism")}
	p.TP.Sequence = s.product("tensor_sequence_parallelism") > 1
	p.CP = plan.CP{Size: s.product("context_parallelism"), Kind: "gather"}
	virtual := max(1, s.number("num_pipeline_repeats", 1))
	p.PP = plan.PP{Size: s.product("pipeline_parallelism"), Virtual: virtual, Schedule: "gpipe"}
	if virtual > 1 {
		p.PP.Schedule = "interleaved"
		f.Notes = append(f.Notes, "MaxText's circular pipeline is taken for interleaved 1F1B")
	}
	p.EP = max(1, s.product("expert_parallelism"))
	p.DP = s.product("data_parallelism")
	shard := s.product("fsdp_parallelism") * s.product("fsdp_transpose_parallelism")
	all := int64(j.Cluster.Count)
	rest := max(1, all/max(1, p.TP.Size*p.CP.Size*p.PP.Size*p.EP))
	switch { // one size may be -1: the rest of the devices
	case p.DP < 0:
		p.DP = max(1, rest/max(1, shard))
	case shard < 0:
		shard = max(1, rest/max(1, p.DP))
	}
	p.FSDP = plan.FSDP{Size: shard, Zero: 3, Gather: "layer"}
	p.Seq = s.number("max_target_length", p.Seq)
	if each, err := strconv.ParseFloat(s.values["per_device_batch_size"], 64); err == nil {
		p.Batch = int64(each*float64(all)) * max(1, s.number("gradient_accumulation_steps", 1))
	}
	p.Microbatches = max(1, s.number("gradient_accumulation_steps", 1)) *
		max(1, s.number("num_pipeline_microbatches", 1))
	switch policy := s.values["remat_policy"]; policy {
	case "full", "":
		p.Recompute = everything(j)
	case "minimal", "minimal_flash", "save_dot_with_context_except_mlp":
		p.Recompute = []ir.Tag{ir.Norm}
		f.Notes = append(f.Notes, "remat_policy "+policy+" is taken for recomputing norms")
	default:
		p.Recompute = []ir.Tag{ir.Norm, ir.MLP}
		f.Notes = append(f.Notes, "remat_policy "+policy+" is taken for recomputing norms and MLP")
	}
	f.Precision = parsePrecision(s.values["quantization"], dtype.FormatBF16)
}
