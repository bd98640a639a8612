# ruff: noqa: E501 - lines of exports
"""Providers' exports and plain CSVs, as they come out of dashboards and spreadsheets."""

from __future__ import annotations

import re
from datetime import date, timedelta
from pathlib import Path

import duckdb
import pytest

from gateway.reconcile.export import Export, ExportError, normal_model, read_export

ROOT = Path(__file__).parents[2]
DAY = date(2026, 11, 20)
OPENAI_USAGE = """start_time,end_time,start_time_iso,end_time_iso,project_id,num_model_requests,user_id,api_key_id,model,batch,input_tokens,output_tokens,input_cached_tokens,input_audio_tokens,output_audio_tokens
1795132800,1795219200,2026-11-20T00:00:00+00:00,2026-11-21T00:00:00+00:00,proj,3,,,gpt-4o-mini-2024-07-18,False,1000,200,400,0,0
1795132800,1795219200,2026-11-20T00:00:00+00:00,2026-11-21T00:00:00+00:00,proj,1,,,gpt-4o-mini-2024-07-18,False,100,20,0,0,0
"""
OPENAI_COST = """start_time,end_time,start_time_iso,end_time_iso,amount_value,amount_currency,quantity,quantity_unit,line_item,user_id,api_key_id,project_id,organization_id
1795132800,1795219200,2026-11-20T00:00:00+00:00,2026-11-21T00:00:00+00:00,0.00012,usd,1,token,"gpt-4o-mini-2024-07-18, input",,,,
1795132800,1795219200,2026-11-20T00:00:00+00:00,2026-11-21T00:00:00+00:00,0.00003,usd,1,token,"gpt-4o-mini-2024-07-18, output",,,,
1795219200,1795305600,2026-11-21T00:00:00+00:00,2026-11-22T00:00:00+00:00,,,,,,,,,
"""
ANTHROPIC_USAGE = """usage_date_utc,model_version,api_key,workspace,usage_type,context_window,usage_input_tokens_no_cache,usage_input_tokens_cache_write_5m,usage_input_tokens_cache_write_1h,usage_input_tokens_cache_read,usage_output_tokens,web_search_count,inference_geo,speed
2026-11-20,claude-sonnet-4-5-20250929,key,Default,standard,≤ 200k,100,20,10,70,50,0,not_available,
"""
ANTHROPIC_COST = """usage_date_utc,model,workspace,api_key,usage_type,context_window,token_type,cost_usd,cost_type
2026-11-20,claude-sonnet-4-5-20250929,Default,key,standard,≤ 200k,input_no_cache,0.0123,token
2026-11-20,claude-sonnet-4-5-20250929,Default,key,batch,≤ 200k,output,0.0077,token
2026-11-20,,Default,key,standard,,,0.03,web_search
"""
OPENROUTER = """generation_id,created_at,cost_total,cost_web_search,cost_cache,cost_file_processing,byok_usage_inference,tokens_prompt,tokens_completion,tokens_reasoning,tokens_cached,model_permaslug,provider_name,variant,cancelled,streamed,user,finish_reason_raw,finish_reason_normalized,generation_time_ms,time_to_first_token_ms,api_key_disabled,api_key_name,app_name
gen-1,2026-11-20 03:46:57.713,0.0123,0,0,0,0,400,137,0,100,openai/gpt-4o-2024-08-06,OpenAI,standard,false,true,,stop,stop,910,204,false,prod,
gen-2,2026-11-20 03:47:01.002,1.2e-05,0,0,0,0,10,5,0,0,openai/gpt-4o-2024-08-06,OpenAI,standard,false,true,,stop,stop,410,104,false,prod,
"""


def read(tmp_path: Path, text: str | bytes, ignored: tuple[str, ...] = ()) -> Export:
    path = tmp_path / "usage.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_export(path, ignored)


def test_openais_exports(tmp_path: Path) -> None:
    """Usage by requests and tokens, cost by line item; a dated model is its undated one, an empty day is none."""
    usage = read(tmp_path, OPENAI_USAGE)
    one = usage.billed[DAY, "gpt-4o-mini"]
    assert (one.requests, one.prompt_tokens, one.cached_tokens, one.completion_tokens) == (4, 1100, 400, 220)
    assert (usage.has_cost, usage.has_requests, one.names) == (False, True, {"gpt-4o-mini-2024-07-18"})
    tiers = OPENAI_USAGE.replace("model,batch,", "model,batch,service_tier,").replace(",False,", ",FALSE,default,")
    assert read(tmp_path, tiers).billed[DAY, "gpt-4o-mini"] == one
    cost = read(tmp_path, OPENAI_COST)
    assert {key: one.cost_microusd for key, one in cost.billed.items()} == {(DAY, "gpt-4o-mini"): 150}
    assert cost.has_cost


def test_the_documents_query_makes_a_plain_csv_of_a_clouds_bill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meters of a model become its days; meters of others are left out."""
    [query] = re.findall(r"```sql\n(.*?)```", (ROOT / "docs/reconcile.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("focus.csv").write_text(
        "ChargePeriodStart,ChargePeriodEnd,BilledCost,ChargeDescription\n"
        "2026-11-20T00:00:00Z,2026-11-21T00:00:00Z,0.25,gpt 4o 0806 Inp glbl Tokens\n"
        "2026-11-20T00:00:00Z,2026-11-21T00:00:00Z,1.0,gpt 4o 0806 Outp glbl Tokens\n"
        "2026-11-20T00:00:00Z,2026-11-21T00:00:00Z,0.5,gpt-4o-mini-0718-Inp-glbl Tokens\n"
        "2026-11-21T00:00:00Z,2026-11-22T00:00:00Z,0.75,gpt 4o 0806 Inp glbl Tokens\n"
        "2026-11-21T00:00:00Z,2026-11-22T00:00:00Z,7.0,D2s v3 virtual machine\n"
    )
    duckdb.sql(query)
    billed = read_export(Path("plain.csv")).billed
    assert {key: one.cost_microusd for key, one in billed.items()} == {
        (DAY, "gpt-4o"): 1_250_000,
        (DAY, "gpt-4o-mini"): 500_000,
        (DAY + timedelta(1), "gpt-4o"): 750_000,
    }


def test_anthropics_exports(tmp_path: Path) -> None:
    """The prompt is what was read and written of the cache and the rest; batches are known, and costs of no model."""
    one = read(tmp_path, ANTHROPIC_USAGE).billed[DAY, "claude-sonnet-4-5"]
    assert (
        one.prompt_tokens,
        one.cached_tokens,
        one.cache_write_tokens,
        one.cache_write_1h_tokens,
        one.completion_tokens,
    ) == (200, 70, 20, 10, 50)
    billed = read(tmp_path, ANTHROPIC_COST).billed
    one = billed[DAY, "claude-sonnet-4-5"]
    assert (one.cost_microusd, one.batch_microusd) == (20_000, 7_700)
    assert billed[DAY, "web_search"].cost_microusd == 30_000


def test_openrouters_export(tmp_path: Path) -> None:
    """A row is a generation; its time has no zone and is UTC; the cost is the total, its parts are not added again."""
    export = read(tmp_path, OPENROUTER)
    one = export.billed[DAY, "gpt-4o"]
    assert (one.cost_microusd, one.prompt_tokens, one.cached_tokens, one.completion_tokens) == (12_312, 410, 100, 142)
    assert (len(export.billed), export.has_requests, export.notes) == (
        1,
        False,
        ["times without a zone are taken as UTC"],
    )


@pytest.mark.parametrize(
    "text",
    [
        "date,model,cost\n2026-11-20,m,1234.5\n",
        b"\xef\xbb\xbfdate;model;cost\n2026-11-20;m;1234,5\n",
        "Date;Model;Cost\r\n2026-11-20;m;1.234,50\r\n",
        'date,model,cost\n2026-11-20,m,"$1,234.50"\n',
        "date\tmodel\tcost\n1795132800\tm\t1 234.5\n",
        'date,model,cost\n"=""2026-11-20""",\'m,1234.5\n',
        "date,model,cost\n2026-11-19T23:30:00-04:00,openai/M,1234.5\n",
        "date,model,cost\n2026-11-20,m,1234.5\n".encode("utf-16"),
    ],
)
def test_what_spreadsheets_make_of_it(tmp_path: Path, text: str | bytes) -> None:
    """Byte-order marks, semicolons, decimal commas, thousands, texts in quotes and zones."""
    assert {key: one.cost_microusd for key, one in read(tmp_path, text).billed.items()} == {(DAY, "m"): 1_234_500_000}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("date,model,cost\n", "no rows"),
        (
            "date,model,price\n",
            "unknown column: 'price'. Expected date, model, and of these what there is: requests, prompt_tokens",
        ),
        ("SubscriptionId,Date,MeterName,CostInBillingCurrency\n", "no column is the model: expected model or"),
        ('{"object": "page", "data": []}', "the file is JSON: expected a CSV"),
        ("date,cost\n", "no column is the model"),
        ("date,model\n", "tokens or costs"),
        ("date,model,cost,amount\n", "two columns"),
        ("date,model,cost\n2026-11-20,m,=1+1\n", "line 2"),
        ("date,model,cost\n2026-11-20,=cmd|'x'!A1,1\n", "the model"),
        ("date,model,cost\n11/20/2026,m,1\n", "the date"),
        ("date,model,cost\n2026-11-20,m,NaN\n", "no number"),
        ("date,model,cost\n2026-11-20,m,1e99\n", "larger than any bill"),
        ('date,model,cost\n2026-11-20,m,"1,234"\n', "a thousand or a fraction"),
        ("date;model;cost\n2026-11-20;m;1.234\n", "a thousand or a fraction"),
        ("date,model,cost\n2026-11-20,m\n", "2 cells"),
        ("date,model,prompt_tokens\n2026-11-20,m,-5\n", "whole number"),
        ("date,model,prompt_tokens,cached_tokens\n2026-11-20,m,5,6\n", "prompt cache"),
        ("date,model,cost,currency\n2026-11-20,m,1,eur\n", "expected usd"),
        ('date,model,cost\n2026-11-20,"m,1\n', "no CSV"),
        (b"PK\x03\x04", "spreadsheet"),
        (b"date,model,cost\n2026-11-20,m\xff,1\n", "UTF-8"),
        ("date,model,cost\n2026-11-20,\x1b[2Jm,1\n", "x1b"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path: Path, text: str | bytes, words: str) -> None:
    """With the line and what was expected; a terminal gets no control character of the file."""
    with pytest.raises(ExportError) as refused:
        read(tmp_path, text)
    assert words in str(refused.value)
    assert str(refused.value).isprintable()


def test_a_column_may_be_left_out(tmp_path: Path) -> None:
    """By its name, as the message says."""
    assert read(tmp_path, "date,model,cost,Team Name\n2026-11-20,m,1,x\n", ("team name",)).billed


def test_names_of_one_model() -> None:
    """Providers, regions and dates in a name make no other model."""
    names = ("gpt-4o", "GPT-4o-2024-08-06", "openai/gpt-4o", "openrouter/openai/gpt-4o")
    assert {normal_model(name) for name in names} == {"gpt-4o"}
    bedrock = normal_model("bedrock/us.anthropic.claude-sonnet-4-5-20250929-v1:0")
    assert bedrock == normal_model("claude-sonnet-4-5") == "claude-sonnet-4-5"
