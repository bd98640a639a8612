-- The ledger's Parquet files in the columns of FOCUS 1.2, the FinOps Open Cost and Usage Specification
-- (https://focus.finops.org/focus-specification/v1-2/), for DuckDB. Put the folder or the bucket of
-- `ledger.files_url` in the place of FOLDER. A row is a generation. Costs are USD at the prices of the
-- configuration; the provider's bill is compared with them by `sameway reconcile`.
CREATE VIEW focus AS
SELECT
    cost_microusd / 1e6 AS BilledCost,
    'sameway' AS BillingAccountId,
    CAST(NULL AS VARCHAR) AS BillingAccountName,
    'USD' AS BillingCurrency,
    date_trunc('month', "at" AT TIME ZONE 'UTC') AS BillingPeriodStart,
    date_trunc('month', "at" AT TIME ZONE 'UTC') + INTERVAL 1 MONTH AS BillingPeriodEnd,
    'Usage' AS ChargeCategory,
    CASE WHEN kind = 'correction' THEN 'Correction' END AS ChargeClass,
    kind || ' by ' || deployment AS ChargeDescription,
    date_trunc('hour', "at" AT TIME ZONE 'UTC') AS ChargePeriodStart,
    date_trunc('hour', "at" AT TIME ZONE 'UTC') + INTERVAL 1 HOUR AS ChargePeriodEnd,
    cost_microusd / 1e6 AS ContractedCost,
    cost_microusd / 1e6 AS EffectiveCost,
    cost_microusd / 1e6 AS ListCost,
    deployment AS InvoiceIssuerName,
    CASE WHEN kind <> 'correction' THEN prompt_tokens + completion_tokens END AS PricingQuantity,
    CASE WHEN kind <> 'correction' THEN 'Tokens' END AS PricingUnit,
    deployment AS ProviderName,
    deployment AS PublisherName,
    'AI and Machine Learning' AS ServiceCategory,
    alias AS ServiceName,
    nullif(region, '') AS RegionId,
    nullif(region, '') AS RegionName,
    id AS ResourceId,
    CAST(team_id AS VARCHAR) AS SubAccountId,
    CAST(NULL AS VARCHAR) AS SubAccountName,
    tags AS Tags,
    "user" AS x_User,
    session AS x_Session,
    CAST(key_id AS VARCHAR) AS x_KeyId
FROM read_parquet('FOLDER/ledger/v1/*/*.parquet');
